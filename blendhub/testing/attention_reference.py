"""The reference for attention of chosen tokens: plain torch, prompt by prompt. It works on any device."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens, PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.devices import planes_of, torch_type
from blendhub.devices.chosen_attention import Keys, attend
from blendhub.devices.chosen_attention import received as weights


class ReferenceAttention(ChosenAttention):
    def __init__(
        self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout, rules: Sequence[AttentionRules]
    ) -> None:
        dtype = torch_type(layout.dtype)
        self._planes = [[plane.view(dtype) for plane in planes_of(layer, block_size, layout)] for layer in layers]
        self._block_size = block_size
        self._rules = rules

    def begin(self, tokens: ChosenTokens) -> None:
        self._tokens = tokens

    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        for prompt, mine, positions in self._prompts(queries.device):
            stored = self._stored(layer, prompt, torch.arange(int(positions.max()) + 1, device=queries.device))
            output[mine] = attend(queries[mine], positions, stored, self._rules[layer]).taken.to(output.dtype)

    def probe(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> None:
        rules, readable = self._rules[layer], self._tokens.readable
        assert readable is not None
        for prompt, mine, positions in self._prompts(queries.device):
            at = torch.from_numpy(np.flatnonzero(readable[prompt])).to(queries.device)
            stored = self._stored(layer, prompt, at)
            own = Keys(positions, keys[mine].float(), values[mine].float())
            both = Keys(*(torch.cat(parts) for parts in zip(stored, own, strict=True)))
            taken, log_sums = attend(queries[mine], positions, both, rules)
            output[mine] = taken.to(output.dtype)
            if received is not None:
                received[prompt, at] += weights(queries[mine], positions, stored, rules, log_sums)

    def _prompts(self, place: torch.device) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each prompt's number, which tokens are its own, and their positions."""
        prompts, positions = (
            torch.from_numpy(part).to(place) for part in (self._tokens.prompts, self._tokens.positions)
        )
        for prompt in np.unique(self._tokens.prompts).tolist():
            mine = prompts == prompt
            yield prompt, mine, positions[mine]

    def _stored(self, layer: int, prompt: int, at: torch.Tensor) -> Keys:
        # Tiles have two axes of tokens and two of width.
        keys, values = (plane.flatten(2, plane.ndim // 2).flatten(3) for plane in self._planes[layer])
        blocks, rules = torch.from_numpy(self._tokens.blocks[prompt]).long().to(at.device), self._rules[layer]
        place = blocks[at // self._block_size], slice(None), at % self._block_size
        scaled = keys[place].float() * rules.key_scale
        return Keys(
            at, scaled, scaled[..., : rules.latent] if rules.latent else values[place].float() * rules.value_scale
        )
