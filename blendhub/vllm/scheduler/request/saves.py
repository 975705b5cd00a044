"""What is stored of one request. Slots are reserved span by span; each slot is then one save, which travels in the plan
of the step that completes its chunk."""

from blendhub.client.answer import Answer
from blendhub.client.session import Reservation
from blendhub.vllm.messages import SaveJob


class RequestSaves:
    def __init__(self) -> None:
        self.planned_end: int | None = None
        """The position up to which slots are reserved for what the hub lacks; None: nothing is planned."""
        self.state_end = 0
        """The position of the last state for which a slot is reserved."""
        self.map_ends: set[int] = set()
        """The ends of the segments whose maps are in a plan. Workers keep a map until they have written it."""
        self.asked: list[Answer[Reservation]] = []
        """Reservations that the hub has not answered yet. Nothing of a span is written before all of it is known."""
        self.reserved: list[SaveJob] = []
        """The saves whose chunks are not complete yet; those of a lease in order."""
        self.reservations: list[Answer[Reservation]] = []
        """All whose rights may hold, also of what was dropped: the workers may still copy some of that."""
        self.is_dropped = False
        """Whether nothing that is computed for this request is stored any more."""
        self.asked_at: float | None = None
        """When slots were asked for first."""
        self.begun_in = 0
        """The step that computed the request's first tokens."""
        self.reached = 0
        """The number of tokens that the last step had computed."""

    @property
    def is_done(self) -> bool:
        """Whether all that was reserved is in a plan or given up, and nothing is left to reserve of the prompt."""
        return self.is_dropped or not (self.planned_end is None or self.asked or self.reserved)

    def drop(self) -> None:
        """Store nothing more in the slots that are reserved: they are of another kind of KV. Others may be reserved."""
        self.planned_end, self.state_end, self.asked, self.reserved = None, 0, [], []

    def close(self) -> None:
        """Write no more of what is reserved, and end the rights; what is stored stays."""
        self.drop()
        reservations, self.reservations = self.reservations, []
        for answer in reservations:
            answer.close()
