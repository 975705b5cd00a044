"""The reference for attention of chosen tokens: plain torch, prompt by prompt. It works on any device."""

from collections.abc import Sequence

import numpy as np
import torch

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens, PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.devices import planes_of, torch_type
from blendhub.devices.chosen_attention import Keys, attend


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

    def attend(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor | None = None
    ) -> None:
        tokens, rules = self._tokens, self._rules[layer]
        # Tiles have two axes of tokens and two of width.
        keys, values = (plane.flatten(2, plane.ndim // 2).flatten(3) for plane in self._planes[layer])
        for prompt, blocks in enumerate(torch.from_numpy(tokens.blocks).long().to(queries.device)):
            mine = torch.from_numpy(tokens.prompts == prompt).to(queries.device)
            positions = torch.from_numpy(tokens.positions).to(queries.device)[mine]
            at = torch.arange(int(positions.max()) + 1, device=queries.device)
            if tokens.readable is not None:
                at = torch.from_numpy(np.flatnonzero(tokens.readable[prompt])).to(queries.device)
            place = blocks[at // self._block_size], slice(None), at % self._block_size
            own_keys = keys[place].float() * rules.key_scale
            own_values = own_keys[..., : rules.latent] if rules.latent else values[place].float() * rules.value_scale
            attended = attend(queries[mine], positions, Keys(at, own_keys, own_values), rules)
            output[mine] = attended.taken.to(output.dtype)
            if log_sums is not None:
                log_sums[mine] = attended.log_sums
