"""The spans of one request that are stored, and the slots that the hub has reserved for them."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Literal, NamedTuple

from blendhub.client.hub_client import Reservation
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.core.spans import Span, gaps, join_spans
from blendhub.vllm.scheduler.blocks.request_blocks import Tables
from blendhub.vllm.scheduler.request_state import RequestState


class SavedSpan(NamedTuple):
    """A span to store, and the kind of its KV: exact, computed behind blended KV, or blended."""

    span: Span
    kind: Literal["exact", "behind", "blended"]


def spans_to_save(
    request: RequestState, min_tokens: int, *, stores_blended: bool, keeps_windows: bool
) -> Iterator[SavedSpan]:
    """What the hub lacks of a prompt, except short spans between moved text: no lookup would find them again.

    ``keeps_windows``: vLLM's own cache has no more of some layers than the last window, which cannot be stored.
    """
    first, n_prompt = request.first_approximate, request.prompt_end
    if request.blended and stores_blended:
        unmoved = [match.span for match in request.matches if not match.moved]
        if lacking := list(gaps(request.blended, unmoved)):
            yield SavedSpan(Span(lacking[0].start, lacking[-1].end), "blended")
    # A trusted request offers all that is exact: the hub says of what it has a copy that may move.
    keeps_exact = not request.terms.donates
    stored = [match.span for match in request.matches if (keeps_exact if match.exact else first is not None)]
    # What earlier requests blended is no text that could be moved.
    settled = None if first is None else request.settled_span
    stored += [span for span in (settled, request.loaded_by_other) if span]
    if keeps_windows and request.engine_tokens:
        stored.append(Span(0, request.engine_tokens))
    stored = join_spans(stored)
    border = n_prompt if first is None else min(first, n_prompt)
    yield from (SavedSpan(gap, "exact") for gap in gaps(Span(0, border), stored))
    for gap in gaps(Span(border, n_prompt), stored):
        if gap.end == n_prompt or len(gap) >= min_tokens:
            yield SavedSpan(gap, "behind")


class ReservedSlots:
    """The slots of one span. Nothing is written before the hub has answered, nor any slot before all of it is known."""

    def __init__(self, reservation: "Future[Reservation]") -> None:
        self.reservation = reservation
        self._n_taken = 0
        self._is_dropped = False

    @property
    def is_pending(self) -> bool:
        """Whether the hub has not answered yet."""
        return not (self.reservation.done() or self._is_dropped)

    @property
    def answer(self) -> Reservation | None:
        """The hub's answer; None before it, and if it was a refusal."""
        reservation = self.reservation
        if not reservation.done() or reservation.cancelled() or reservation.exception():
            return None
        return reservation.result()

    @property
    def unused_right(self) -> WriteRight | None:
        """The right to write, unless it was used to its end."""
        answer = self.answer
        if answer is None or (self._n_taken == len(answer.slots) and not self._is_dropped):
            return None
        return answer.right

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to write, however much is computed."""
        return not self.is_pending and (self._is_dropped or self.unused_right is None)

    def drop(self) -> None:
        """Store nothing that is not stored yet."""
        self._is_dropped = True

    def take_complete(self, computed: int) -> Iterator[tuple[WriteRight, Slot]]:
        """The slots that are complete now that tokens up to ``computed`` are, each once and in order."""
        answer = self.answer
        if answer is None or answer.right is None:
            return
        for slot in answer.slots[self._n_taken :]:
            if self._is_dropped or slot.span.end > computed:
                break
            self._n_taken += 1
            yield answer.right, slot


class RequestSaves:
    """The saves of one request."""

    def __init__(self, request: RequestState) -> None:
        self.request = request
        self.since = time.monotonic()
        """When slots were asked for first."""
        self.begun_in = 0
        """The step that computed the request's first tokens."""
        self.reserved: list[ReservedSlots] = []
        self.is_planned = False
        """Whether slots are reserved for what the prompt lacks, as far as that is known."""
        self.reached = 0
        """The number of tokens that the last step had computed."""
        self.answer_end = request.prompt_end
        """The position up to which slots are reserved for the answer."""
        self.is_dropped = False
        """Whether nothing that is computed for this request is stored any more."""

    def drop(self) -> None:
        """Store nothing more in the slots that are reserved; the rights end with the request."""
        for slots in self.reserved:
            slots.drop()
        self.is_planned = False
        self.answer_end = self.request.prompt_end

    @property
    def is_pending(self) -> bool:
        return any(slots.is_pending for slots in self.reserved)

    def are_answered(self, within: float) -> bool:
        """Whether the hub answers every reservation ``within`` so many seconds."""
        wait([slots.reservation for slots in self.reserved if slots.is_pending], within)
        return not self.is_pending

    @property
    def is_done(self) -> bool:
        """Whether everything that was reserved is written or given up."""
        return all(slots.is_done for slots in self.reserved)

    @property
    def are_over(self) -> bool:
        """Whether nothing of the request is left to store when it ends, so that its blocks are not needed."""
        return not self.begun_in or (not self.is_planned and (self.is_dropped or not self.request.lacks_adapter))

    def end(self, computed: int, tables: Tables, ranks: int) -> None:
        """The request has ended: from now on its KV up to ``computed`` is stored, from these blocks."""
        self.computed = computed
        self.tables = tables
        self.uncommitted_ranks = ranks
        self.ended_at = time.monotonic()
