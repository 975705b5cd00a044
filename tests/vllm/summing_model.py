"""A model whose KV and states tell what they were computed from."""

from typing import Any

import numpy as np
import torch

from tests.vllm.stand_in_model import BLOCK, StandInModel

VOCABULARY = 6
STATE_BLOCK = 24
"""The tokens of a block of recurrent layers, which are in table 1."""


class SummingModel(StandInModel):
    """A token's KV is the sum of all tokens up to it, and a prediction the sum's remainders.

    A state is such a sum, which goes from span to span."""

    def __init__(self, n_blocks: int, stale: int) -> None:
        """``stale``: what blocks hold before anything is computed."""
        super().__init__()
        self.kv = np.full(n_blocks * BLOCK, stale)
        self.forwards: list[int] = []
        self.fails_behind = 10**9
        """No token behind so many of a prompt can be computed."""
        self.block_sizes = (BLOCK, STATE_BLOCK)
        self.states: dict[int, tuple[int, int]] = {}
        """By block of recurrent layers: behind how many tokens its state stands, and the sum of these."""

    def forward(self, chosen, *, positions=None, replays=True):
        if max(span.end for span in chosen.spans) > self.fails_behind:
            raise RuntimeError("no memory is left")
        assert len(chosen) <= self.max_tokens and len(chosen.spans) <= self.max_spans
        self.forwards.append(len(chosen))
        slots = chosen.slots(BLOCK)
        for part, of_part in enumerate(chosen.parts):
            for place in sorted(chosen.places(part), key=lambda place: chosen.positions[place]):
                at = chosen.positions[place]
                before = self.kv[of_part.tables[0][(at - 1) // BLOCK] * BLOCK + (at - 1) % BLOCK] if at else 0
                self.kv[slots[place]] = of_part.tokens[at] + before
            if of_part.path:
                (span,), block = of_part.spans, int(of_part.tables[1][0])
                behind, total = self.states[block]
                assert behind == span.start == of_part.path.at and span.end == of_part.path.until
                self.states[block] = span.end, total + int(of_part.tokens[span.start : span.end].sum())
        return torch.from_numpy(self.kv[slots].astype(float)).reshape(-1, 1)

    def logits(self, hidden):
        return predictions(hidden[:, 0])

    def copy_states(self, blocks, sources):
        self.states[blocks[1]] = self.states[sources[1]]

    def to_device(self, numbers):
        return torch.from_numpy(np.asarray(numbers))


def predictions(sums: Any) -> torch.Tensor:
    sums = torch.as_tensor(sums)
    return torch.stack([sums % (3 + token) for token in range(VOCABULARY)], 1).float()
