"""How long requests wait for their first tokens, by what they reuse."""

import time
from collections.abc import Callable

from blendhub.vllm.scheduler.request_state import RequestState


class FirstTokens:
    """Called by the scheduler's thread, once a step after vLLM has added the step's tokens."""

    def __init__(self, add: Callable[[str, float], None], clock: Callable[[], float] = time.time) -> None:
        """``add``: keeps the seconds of a request, by its reuse. ``clock``: that of vLLM's arrival times."""
        self._add = add
        self._clock = clock
        self._waiting: dict[str, RequestState] = {}
        """The requests that vLLM has begun and that have no token yet."""

    def begin(self, state: RequestState) -> None:
        if not state.has_begun_to_answer:
            self._waiting[state.id] = state

    def look(self) -> None:
        for state in [state for state in self._waiting.values() if state.has_begun_to_answer]:
            self.end(state)

    def end(self, state: RequestState) -> None:
        """Note that the request has its first token, or has ended without one."""
        if self._waiting.pop(state.id, None) and state.has_begun_to_answer:
            self._add(state.reuse, self._clock() - state.request.arrival_time)
