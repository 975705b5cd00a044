"""Reports the fate of each prompt to the hub, for `blendhub explain` and the hub's page."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from blendhub.client.hub_client import HubClient
from blendhub.core.spans import Match, Span
from blendhub.outcome.report import MOST_REPORTS, PromptReport, prompt_report
from blendhub.vllm.hub_executor import RunCall
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.scheduler.unused import Attempt, why_unused

MOST_WAITING = 256
"""The most requests that wait to be reported; while the hub does not answer, the oldest are forgotten."""


class PromptReports:
    """The reports to the hub. Called by the scheduler's thread; waits for nothing."""

    def __init__(self, run: RunCall) -> None:
        self._run = run
        self._waiting: deque[partial[PromptReport]] = deque(maxlen=MOST_WAITING)
        self._is_asked = False
        """Whether the executor's thread has been asked to send the waiting reports."""

    def ended(self, state: RequestState, reason: str | None) -> None:
        """Report a request that has ended. Its strip is made on the thread that sends it."""
        spans, sources = _reused(state)
        n_tokens = state.request.num_prompt_tokens
        engine_tokens = min(state.engine_tokens, n_tokens)
        made = partial(
            prompt_report, state.id, n_tokens, engine_tokens, spans, sources, reason, variant=state.terms.variant
        )
        self._waiting.append(partial(_explained, made, Attempt.of(state), n_tokens))
        if not self._is_asked:
            self._is_asked = True
            self._run(self._send).add_done_callback(self._answered)

    def _send(self, client: HubClient) -> None:
        # Before it looks what waits: a request that ends from now on asks again.
        self._is_asked = False
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(MOST_REPORTS, len(self._waiting)))]
            client.report_prompts([made() for made in some])

    def _answered(self, sent: "Future[None]") -> None:
        """Note the end of a message. A message that the hub refuses or misses is not repeated."""
        self._is_asked = False


def _explained(made: Callable[..., PromptReport], attempt: Attempt, n_tokens: int) -> PromptReport:
    return made(whys=why_unused(attempt, n_tokens))


def _reused(state: RequestState) -> tuple[dict[str, list[Span]], list[Match]]:
    """The reused spans, by their names in the report, and the matches that were loaded."""
    loaded = state.loaded
    if loaded is None:
        return state.reused_spans(), []
    some = [match for match in loaded.matches if match.span.end > loaded.start]
    sources = [match.part(max(loaded.start, match.span.start), match.span.end) for match in some]
    return state.reused_spans(), sources
