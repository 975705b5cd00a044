"""The spans of one request that are stored, how far each has been written, and what else is known of its saves."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Literal

from blendhub.client.hub_client import Reservation
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.core.spans import Span, gaps
from blendhub.vllm.scheduler.blocks.prefix_cache import Tables
from blendhub.vllm.scheduler.request_state import RequestState

Kind = Literal["exact", "behind", "blended"]
"""The kind of KV: exact, computed behind blended KV, or blended."""

Reserve = Callable[[Span, Kind, int | None], "Future[Reservation]"]
"""A function that reserves slots for a span. Its other arguments are the KV's kind and the run to continue."""


class PlannedSave:
    """A span to store. Nothing is written before the hub has answered with slots."""

    def __init__(self, span: Span, reserved: "Future[Reservation]") -> None:
        self.span = span
        self.reserved = reserved
        self._written: int | None = None
        self._is_dropped = False

    @property
    def is_pending(self) -> bool:
        """Whether the hub has not answered yet."""
        return not (self.reserved.done() or self._is_dropped)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to write, however much is computed."""
        return not self.is_pending and (self._is_dropped or self.open_right is None)

    @property
    def reservation(self) -> Reservation | None:
        """The slots; None while the hub has not answered, or if it refused."""
        if not self.reserved.done() or self.reserved.cancelled() or self.reserved.exception():
            return None
        return self.reserved.result()

    @property
    def open_right(self) -> WriteRight | None:
        """The right to write, unless all of it was used."""
        reservation = self.reservation
        if reservation is None or reservation.right is None:
            return None
        if self._written == reservation.span.end and not self._is_dropped:
            return None
        return reservation.right

    def drop(self) -> None:
        """Store nothing that is not stored yet."""
        self._is_dropped = True

    def next_part(self, computed: int) -> tuple[WriteRight, tuple[Slot, ...], Span] | None:
        """The next part to write, now that tokens up to ``computed`` are computed: right, slots and span."""
        reservation = self.reservation
        if reservation is None or reservation.right is None or self._is_dropped:
            return None
        span = reservation.span
        start = span.start if self._written is None else self._written
        end = min(computed, span.end)
        if start >= end:
            return None
        self._written = end
        slots = tuple(slot for slot in reservation.slots if slot.span.end > start and slot.span.start < end)
        return reservation.right, slots, Span(start, end)


class SavePlan:
    """The planned saves of one request."""

    def __init__(self, reserve: Reserve, min_tokens: int) -> None:
        self.saves: list[PlannedSave] = []
        self._reserve = reserve
        self._min_tokens = min_tokens
        self._answer_end = 0
        """The position up to which saves of the answer are planned."""

    def blend(self, span: Span, settled: Sequence[Span]) -> None:
        """Store blended KV, and what stands between, from the first token on that ``settled``, ascending, lacks."""
        lacking = list(gaps(span, settled))
        if lacking:
            self._add(Span(lacking[0].start, lacking[-1].end), "blended", None)

    def begin(self, n_prompt: int, stored: Sequence[Span], first_approximate: int | None) -> None:
        """Store the parts of the prompt that ``stored``, ascending, lacks, except short ones between moved text: no
        lookup would find them again."""
        border = n_prompt if first_approximate is None else min(first_approximate, n_prompt)
        for gap in gaps(Span(0, border), stored):
            self._add(gap, "exact", None)
        for gap in gaps(Span(border, n_prompt), stored):
            if gap.end == n_prompt or len(gap) >= self._min_tokens:
                self._add(gap, "behind", None)

    def add_answer(self, n_prompt: int, computed: int, exact: bool, least: int = 1) -> None:
        """Store the generated tokens, too, if ``least`` or more have been computed since the last time."""
        start = max(n_prompt, self._answer_end)
        if computed - start < least:
            return
        last = self.saves[-1].reservation if self.saves else None
        continues = last is not None and last.span.end == start
        kind: Kind = "exact" if exact else "behind"
        self._add(Span(start, computed), kind, last.run if last and continues else None)
        self._answer_end = computed

    def drop(self) -> None:
        """Store nothing that is not stored yet."""
        for save in self.saves:
            save.drop()

    @property
    def is_done(self) -> bool:
        """Whether everything planned is written or given up."""
        return all(save.is_done for save in self.saves)

    @property
    def open_rights(self) -> list[WriteRight]:
        return [right for save in self.saves if (right := save.open_right) is not None]

    @property
    def is_pending(self) -> bool:
        return any(save.is_pending for save in self.saves)

    def answered(self, within: float) -> bool:
        """Whether the hub has answered every reservation ``within`` so many seconds."""
        wait([save.reserved for save in self.saves if save.is_pending], within)
        return not self.is_pending

    def _add(self, span: Span, kind: Kind, run: int | None) -> None:
        self.saves.append(PlannedSave(span, self._reserve(span, kind, run)))


class RequestSaves:
    """The saves of one request."""

    def __init__(self, request: RequestState) -> None:
        self.request = request
        self.begun_in = 0
        """The step that computed the request's first tokens."""
        self.plan: SavePlan | None = None
        self.retired: list[SavePlan] = []
        """Earlier plans. The workers finish the saves of these plans; no more saves are scheduled."""
        self.reached = 0
        """The number of tokens that the last step had computed."""
        self.is_dropped = False
        """Whether the cache was reset, so that nothing that is computed for this request is stored any more."""

        self.has_answer = False
        """Whether its answer is planned, too."""
        self.since = time.monotonic()
        """When it was asked for first."""

    def retire(self) -> None:
        self.retired += [self.plan] if self.plan else []
        self.plan = None

    @property
    def are_over(self) -> bool:
        """Whether nothing of the request is left to store when it ends, so that its blocks are not needed."""
        return not self.begun_in or (self.plan is None and (self.is_dropped or not self.request.lacks_adapter))

    @property
    def plans(self) -> list[SavePlan]:
        """All plans, the earlier ones first."""
        return [*self.retired, *([self.plan] if self.plan else [])]

    def end(self, computed: int, tables: Tables, ranks: int) -> None:
        """The request has ended: from now on its KV up to ``computed`` is stored, from these blocks."""
        self.computed = computed
        self.tables = tables
        self.uncommitted_ranks = ranks
        self.ended_at = time.monotonic()
