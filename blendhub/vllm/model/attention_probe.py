"""How much the end of a prompt attends to the stored tokens before it, found by a forward that writes no KV."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.devices.chosen_attention import SLICE_BYTES, Attended, Keys, attend, merged, received
from blendhub.vllm.model.engine_model import EngineModel, StopForward
from blendhub.vllm.model.own_layers import rules_of
from blendhub.vllm.model.pages import LayerPages, read_as_computed
from blendhub.vllm.model.platform import Tensors
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
        layers = [self.layers[name] for name in (self.counted if self.model.attention else self.layers)]
        copies = max(layer.layout.key_row_bytes + layer.layout.value_row_bytes for layer in layers)
        return n_keys * copies + SLICES_AT_ONCE * SLICE_BYTES

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

    Tokens attend to stored keys in the pages, by the device if the model's forwards do, and to each other's.
    """

    def __init__(self, probe: AttentionProbe, queries: Sequence[AttentionQuery]) -> None:
        self.chosen = RecomputeSet([query.asking for query in queries])
        self._probe = probe
        self._last = probe.model.layer_names[probe.last]
        self._prompts = [_Prompt(probe.model, query, self.chosen, number) for number, query in enumerate(queries)]
        self.received = [torch.zeros(query.stored[-1].end, device=probe.model.device) for query in queries]
        self._attend_in: dict[str, Callable[..., None]] = {}
        if probe.model.attention:
            readable = np.zeros((len(queries), max(map(len, self.received))), np.bool_)
            for row, query in zip(readable, queries, strict=True):
                for span in query.stored:
                    row[span.start : span.end] = True
            self._attend_in = probe.model.begin_attention(self.chosen, readable)

    def __call__(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        name = layer.layer_name
        rules = self._probe.rules[name]
        in_pages = self._from_pages(name, query[: len(self.chosen)], value.shape[-1])
        for prompt, total in zip(self._prompts, self.received, strict=True):
            places = prompt.places
            beside = Keys(prompt.positions, key[places], value[places])
            own = attend(query[places], prompt.positions, beside, rules._replace(sinks=None))
            both = (torch.stack([stored[places], asking]) for stored, asking in zip(in_pages, own, strict=True))
            whole = merged(Attended(*both))
            output[places] = whole.taken.to(output.dtype)
            if name in self._probe.counted:
                keys, _ = self._stored(name, prompt)
                weights = received(query[places], prompt.positions, prompt.stored, keys, rules, whole.log_sums)
                total[prompt.stored] += weights
        if name == self._last:
            raise StopForward

    def _from_pages(self, name: str, queries: torch.Tensor, width: int) -> Attended:
        """What all tokens take from the stored values."""
        rules = self._probe.rules[name]
        taken = queries.new_empty((*queries.shape[:2], width), dtype=torch.float32)
        log_sums = taken.new_empty(taken.shape[:2])
        if self._attend_in:
            self._attend_in[name](queries, taken, log_sums)
            return Attended(taken, log_sums)
        for prompt in self._prompts:
            keys, values = self._stored(name, prompt)
            latent = keys[..., : rules.latent] if rules.latent else values
            attended = attend(queries[prompt.places], prompt.positions, Keys(prompt.stored, keys, latent), rules)
            taken[prompt.places], log_sums[prompt.places] = attended
        return Attended(taken, log_sums)

    def _stored(self, name: str, prompt: "_Prompt") -> Tensors:
        slots = prompt.slots[self._probe.model.tables[name]]
        return read_as_computed(self._probe.model, self._probe.layers[name], slots)


class _Prompt:
    """Where the tokens of one prompt stand: in the forward, in the prompt and in the pages."""

    def __init__(self, model: EngineModel, query: AttentionQuery, chosen: RecomputeSet, number: int) -> None:
        places = chosen.places(number)
        # The tokens of the only prompt need no index, which would be a copy in each layer.
        self.places = slice(len(chosen)) if len(chosen.parts) == 1 else model.sent(places)
        self.positions = model.sent(chosen.positions[places])
        stored = RecomputeSet([query.asking._replace(spans=query.stored)])
        self.stored = model.sent(stored.positions)
        self.slots = model.slots_of_tables(stored)
