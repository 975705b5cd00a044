"""How much the end of a prompt attends to the stored tokens before it, found by a forward that writes no KV."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.devices.chosen_attention import SLICE_BYTES, Keys, attend, received
from blendhub.vllm.model.engine_model import EngineModel, StopForward
from blendhub.vllm.model.own_layers import rules_of
from blendhub.vllm.model.pages import LayerPages, read_as_computed
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens

SLICES_AT_ONCE = 4
"""Products, their powers and two copies in float32 exist at a time."""


class AttentionQuery(NamedTuple):
    """Some tokens of a prompt, and the tokens that they may attend to."""

    asking: RequestTokens
    """The tokens whose queries are computed."""
    stored: Sequence[Span]
    """The tokens whose KV is read from the pages: ascending, disjoint, not empty. All others are left out."""


class AttentionProbe:
    """Computes the tokens that ask, up to the last layer that counts. They attend to what is stored and to each other.

    Neither they nor the tokens that are left out need pages.
    """

    def __init__(self, model: EngineModel, layers: Sequence[LayerPages], depths: Sequence[float]) -> None:
        """``depths``: the layers that count, as fractions of the model's depth; see ``counted_layers``. Raises
        Unsupported."""
        named = [model.layer(name) for name in model.layer_names[: model.n_own_layers]]
        numbers = counted_layers(depths, [_sees_all(layer) for layer in named])
        self.last = max(numbers)
        self.counted = {model.layer_names[number] for number in numbers}
        names = model.layer_names[: self.last + 1]
        self.layers = dict(zip(names, layers, strict=False))
        try:
            self.rules = {name: rules_of(model.layer(name)) for name in names}
        except Unsupported as error:
            raise Unsupported(f"BlendHub does not compute what tokens attend to here: {error}") from error
        self.model = model

    def received(self, queries: Sequence[AttentionQuery]) -> list[torch.Tensor]:
        """For each prompt, the weight that each position gets from the tokens that ask: summed over the layers that
        count and the heads of this rank.

        Float32, up to the last stored token; 0 for what is left out. Nothing here waits for the device.
        """
        attention = ProbeAttention(self, queries)
        self.model.forward_apart(attention.chosen, list(self.layers), attention)
        return attention.received

    def memory(self, n_keys: int) -> int:
        """About the most bytes that a probe of so many keys takes for a while beside its forward."""
        if self.model.attention:  # it reads the pages
            return 4 * n_keys
        copies = max(layer.layout.key_row_bytes + layer.layout.value_row_bytes for layer in self.layers.values())
        return 2 * n_keys * copies + SLICES_AT_ONCE * SLICE_BYTES  # as they are read, and with those of the tokens

    def reserve(self, queries: Sequence[AttentionQuery]) -> None:
        """Have the memory of a probe; raises if there is too little. It is free again, and torch keeps it at hand."""
        most = max(query.stored[-1].end for query in queries)
        torch.empty(self.memory(most), dtype=torch.uint8, device=self.model.device)


def counted_layers(depths: Sequence[float], see_all: Sequence[bool]) -> set[int]:
    """For each depth the nearest layer without a window, which does not know what stands before it."""
    whole = [number for number, sees_all in enumerate(see_all) if sees_all] or list(range(len(see_all)))
    return {min(whole, key=lambda number: abs(number - int(depth * len(see_all)))) for depth in depths}


def _sees_all(layer: Any) -> bool:
    return getattr(layer, "sliding_window", None) is None and getattr(layer, "attention_chunk_size", None) is None


class ProbeAttention:
    """The attention of one probe, called by each layer in its turn.

    Tokens attend to stored keys in the pages, and to each other's: by the device if the model's forwards do.
    """

    def __init__(self, probe: AttentionProbe, queries: Sequence[AttentionQuery]) -> None:
        self.chosen = RecomputeSet([query.asking for query in queries])
        self._probe = probe
        self._last = probe.model.layer_names[probe.last]
        ends = [query.stored[-1].end for query in queries]
        self._sums = torch.zeros(len(queries), max(ends), device=probe.model.device)
        self.received = [sums[:end] for sums, end in zip(self._sums, ends, strict=True)]
        self._prompts: list[_Prompt] = []
        self._probe_in: dict[str, Callable[..., None]] = {}
        if probe.model.attention:
            readable = np.zeros(self._sums.shape, np.bool_)
            for row, query in zip(readable, queries, strict=True):
                for span in query.stored:
                    row[span.start : span.end] = True
            self._probe_in = probe.model.begin_attention(self.chosen, readable)
        else:
            self._prompts = [_Prompt(probe.model, query, self.chosen, number) for number, query in enumerate(queries)]

    def __call__(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        name, n = layer.layer_name, len(self.chosen)
        sums = self._sums if name in self._probe.counted else None
        if self._probe_in:
            self._probe_in[name](query[:n], key[:n], value[:n], output[:n], sums)
        else:
            self._attend(name, query, key, value, output)
        if name == self._last:
            raise StopForward

    def _attend(
        self, name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        """In plain torch."""
        probe, rules = self._probe, self._probe.rules[name]
        for prompt, total in zip(self._prompts, self.received, strict=True):
            places, slots = prompt.places, prompt.slots[probe.model.tables[name]]
            keys, values = read_as_computed(probe.model, probe.layers[name], slots)
            stored = Keys(prompt.stored, keys, keys[..., : rules.latent] if rules.latent else values)
            own = Keys(prompt.positions, key[places], value[places])
            both = Keys(*(torch.cat(parts) for parts in zip(stored, own, strict=True)))
            taken, log_sums = attend(query[places], prompt.positions, both, rules)
            output[places] = taken.to(output.dtype)
            if name in probe.counted:
                total[prompt.stored] += received(query[places], prompt.positions, stored, rules, log_sums)


class _Prompt:
    """Where the tokens of one prompt stand: in the forward, in the prompt and in the pages."""

    def __init__(self, model: EngineModel, query: AttentionQuery, chosen: RecomputeSet, number: int) -> None:
        places = chosen.places(number)
        # The tokens of the only prompt need no index, which would be a copy in each layer.
        self.places = slice(len(chosen)) if len(chosen.parts) == 1 else model.to_device(places)
        self.positions = model.to_device(chosen.positions[places])
        stored = RecomputeSet([query.asking._replace(spans=query.stored)])
        self.stored = model.to_device(stored.positions)
        self.slots = model.slots_of_tables(stored)
