"""The spans of one request that are stored, and the slots that the hub has reserved for them."""

import time
from collections.abc import Iterator

from blendhub.client.answer import Answer
from blendhub.client.session import Reservation
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight


class ReservedSlots:
    """The slots of one span. Nothing is written before the hub has answered, nor any slot before all of it is known."""

    def __init__(self, answer: Answer[Reservation]) -> None:
        self.answer = answer
        self._n_taken = 0
        self._is_dropped = False

    @property
    def is_pending(self) -> bool:
        """Whether the hub has not answered yet."""
        return not (self._is_dropped or self.answer.done())

    @property
    def reservation(self) -> Reservation | None:
        """The hub's answer; None before it, and if it was a refusal."""
        return self.answer.reply if self.answer.done() else None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to write, however much is computed."""
        reserved = self.reservation
        return self._is_dropped or (reserved is not None and self._n_taken == len(reserved.slots))

    def drop(self) -> None:
        """Store nothing that is not stored yet."""
        self._is_dropped = True

    def take_complete(self, computed: int) -> Iterator[tuple[WriteRight, Slot]]:
        """The slots that are complete now that tokens up to ``computed`` are, each once and in order."""
        reserved = self.reservation
        if reserved is None or reserved.right is None:
            return
        for slot in reserved.slots[self._n_taken :]:
            if self._is_dropped or slot.span.end > computed:
                break
            self._n_taken += 1
            yield reserved.right, slot


class RequestSaves:
    """What is stored of one request."""

    def __init__(self, prompt_end: int) -> None:
        self.reserved: list[ReservedSlots] = []
        self.is_planned = False
        """Whether slots are reserved for what the prompt lacks, as far as that is known."""
        self.is_dropped = False
        """Whether nothing that is computed for this request is stored any more."""
        self.asked_at: float | None = None
        """When slots were asked for first."""
        self.begun_in = 0
        """The step that computed the request's first tokens."""
        self.reached = 0
        """The number of tokens that the last step had computed."""
        self.answer_end = self._prompt_end = prompt_end
        """The position up to which slots are reserved for the answer."""

    @property
    def is_pending(self) -> bool:
        return any(slots.is_pending for slots in self.reserved)

    @property
    def is_done(self) -> bool:
        """Whether everything that was reserved is written or given up, and nothing is left to reserve of the prompt."""
        return self.is_dropped or (self.is_planned and all(slots.is_done for slots in self.reserved))

    def are_answered(self, within: float) -> bool:
        """Whether the hub answers every reservation ``within`` so many seconds."""
        until = time.monotonic() + within
        for slots in self.reserved:
            slots.answer.done(max(0.0, until - time.monotonic()))
        return not self.is_pending

    def drop(self) -> None:
        """Store nothing more in the slots that are reserved: they are of another kind of KV. Others may be reserved."""
        for slots in self.reserved:
            slots.drop()
        self.is_planned, self.answer_end = False, self._prompt_end

    def close(self) -> None:
        """Write no more of what is reserved, and end the rights; what is stored stays."""
        self.drop()
        reserved, self.reserved = self.reserved, []
        for slots in reserved:
            slots.answer.close()
