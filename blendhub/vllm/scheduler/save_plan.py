"""Which KV of a request is stored, and how far that has come."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from blendhub.client import Reservation
from blendhub.plan import Match, Span, gaps
from blendhub.wire import Slot
from blendhub.write_rights import WriteRight

Reserve = Callable[[Span, bool, int | None], "Future[Reservation]"]
"""Asks the hub for slots for a span: is it exact, and which run does it go on?"""


class Part:
    """A span to store. Its slots come from the hub when they come; what is computed until then waits."""

    def __init__(self, span: Span, exact: bool, reserved: "Future[Reservation]") -> None:
        self.span = span
        self.exact = exact
        self._reserved = reserved
        self._written: int | None = None
        self._is_dropped = False

    @property
    def is_asked_for(self) -> bool:
        """Whether the hub has yet to answer."""
        return not (self._reserved.done() or self._is_dropped)

    @property
    def reservation(self) -> Reservation | None:
        """The slots; None while the hub has not answered, or if it had none."""
        if not self._reserved.done() or self._reserved.cancelled() or self._reserved.exception():
            return None
        return self._reserved.result()

    @property
    def open_right(self) -> WriteRight | None:
        """A right that was not used to its end."""
        reservation = self.reservation
        if reservation is None or reservation.right is None:
            return None
        if self._written == reservation.span.end and not self._is_dropped:
            return None
        return reservation.right

    def drop(self) -> None:
        """Store none of it that is not stored yet."""
        self._is_dropped = True

    def take(self, computed: int) -> tuple[WriteRight, tuple[Slot, ...], Span] | None:
        """What can be written now that tokens up to ``computed`` are there: right, slots and span."""
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
    """The parts of one request's text that are to be stored."""

    def __init__(self, reserve: Reserve, min_tokens: int) -> None:
        self.parts: list[Part] = []
        self._reserve = reserve
        self._min_tokens = min_tokens

    def begin(self, n_prompt: int, stored: Sequence[Match], first_approximate: int | None) -> None:
        """Store what of the prompt is not stored; short stretches between moved text could never be found again."""
        for gap in gaps(Span(0, n_prompt), (match.span for match in stored)):
            exact = first_approximate is None or gap.end <= first_approximate
            if exact or gap.end == n_prompt or len(gap) >= self._min_tokens:
                self._add(gap, exact, None)

    def end(self, n_prompt: int, computed: int, exact: bool) -> None:
        """Store the answer too, as it is known now."""
        if computed > n_prompt:
            last = self.parts[-1].reservation if self.parts else None
            goes_on = last is not None and last.span.end == n_prompt
            self._add(Span(n_prompt, computed), exact, last.run if last and goes_on else None)

    def drop(self) -> None:
        """Store none of it that is not stored yet."""
        for part in self.parts:
            part.drop()

    @property
    def open_rights(self) -> list[WriteRight]:
        return [right for part in self.parts if (right := part.open_right) is not None]

    @property
    def waits(self) -> bool:
        return any(part.is_asked_for for part in self.parts)

    def _add(self, span: Span, exact: bool, run: int | None) -> None:
        self.parts.append(Part(span, exact, self._reserve(span, exact, run)))
