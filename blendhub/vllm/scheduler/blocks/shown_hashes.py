"""The block hashes that connectors beside BlendHub have seen, and may have kept."""

from blendhub.vllm.scheduler.request_state import RequestState


class ShownHashes:
    """Keeps blended blocks from being stored under hashes that a connector has seen before the blend was decided.

    vLLM asks BlendHub for a request first, and then the other connectors, which look at its hashes and may keep them.
    So hashes are salted with the decision to blend, and not only when vLLM has allocated blocks; and no request blends
    what was shown under its own hashes. For the scheduler's thread.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._salted: dict[str, RequestState] = {}
        """The requests whose hashes were salted in this step, and for which vLLM has not allocated blocks yet."""

    def show(self, state: RequestState, first_approximate: int | None) -> None:
        """The other connectors are asked next; from this position on, the request's KV will be approximate."""
        n_exact = state.request.num_tokens if first_approximate is None else first_approximate
        state.shown_exact = max(state.shown_exact, n_exact)
        if first_approximate is not None:
            state.salt(first_approximate, self._block_size)
            self._salted[state.id] = state

    def is_salted(self, state: RequestState) -> bool:
        """Whether the hashes are salted already; asked once vLLM has allocated blocks."""
        return self._salted.pop(state.id, None) is not None

    def end_step(self) -> None:
        """vLLM has planned a step: requests without blocks get their own hashes back, for vLLM's next look."""
        for state in self._salted.values():
            state.hashes.undo_salt()
        self._salted.clear()
