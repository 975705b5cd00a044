"""Decides which requests take settled KV, and keeps the blended blocks in vLLM's own cache for later requests."""

from blendhub.vllm.scheduler.audits import Audits
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.scheduler.settled_blocks import SettledBlocks


class Settling:
    """The rules of settled KV. Called by the scheduler's thread."""

    def __init__(self, audits: Audits) -> None:
        self.blocks = SettledBlocks()
        self._audits = audits

    def least_ratio(self, state: RequestState) -> float | None:
        """The share that must have been recomputed in settled KV for this request; None: it takes none."""
        return self._audits.ratio_for(state, audited=False) if state.terms.settles else None

    def take(self, state: RequestState) -> bool:
        """Have vLLM look for the blended blocks that the request may take; returns whether that is new.

        A request that is to be audited takes none, because exact KV cannot be written in their place.
        """
        request, ratio, settled = state.request, self.least_ratio(state), None
        if ratio is not None and not request.skip_reading_prefix_cache and not self._audits.wants(state):
            settled = self.blocks.find(state.hashes.own(), request.num_tokens, ratio)
        return state.take(settled)

    def remember(self, state: RequestState) -> None:
        """Remember the blended blocks that vLLM caches of the request, or the tokens generated behind them."""
        if state.first_approximate is not None:
            self.blocks.remember(state.hashes.own(), state.hashes.cached(), state.first_approximate, state.ratio)
