"""How much the end of a prompt attends to the stored tokens before it, found by a forward that writes no KV."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.devices.chosen_attention import Keys, attend
from blendhub.vllm.model.engine_model import EngineModel, StopForward
from blendhub.vllm.model.own_layers import rules_of
from blendhub.vllm.model.pages import LayerPages, read_as_computed
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens


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
        named = [model.layer(name) for name in model.layer_names[: len(layers)]]
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


def counted_layers(depths: Sequence[float], see_all: Sequence[bool]) -> set[int]:
    """For each depth the nearest layer without a window, which does not know what stands before it."""
    whole = [number for number, sees_all in enumerate(see_all) if sees_all] or list(range(len(see_all)))
    return {min(whole, key=lambda number: abs(number - int(depth * len(see_all)))) for depth in depths}


def _sees_all(layer: Any) -> bool:
    return getattr(layer, "sliding_window", None) is None and getattr(layer, "attention_chunk_size", None) is None


class ProbeAttention:
    """The attention of one probe, called by each layer in its turn."""

    def __init__(self, probe: AttentionProbe, queries: Sequence[AttentionQuery]) -> None:
        self.chosen = RecomputeSet([query.asking for query in queries])
        self._probe = probe
        self._last = probe.model.layer_names[probe.last]
        self._prompts = [_Prompt(probe.model, query, self.chosen, number) for number, query in enumerate(queries)]
        device = probe.model.device
        self.received = [torch.zeros(query.stored[-1].end, device=device) for query in queries]

    def __call__(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        name, probe = layer.layer_name, self._probe
        for prompt, total in zip(self._prompts, self.received, strict=True):
            places, rules = prompt.places, probe.rules[name]
            slots = prompt.slots[probe.model.tables[name]]
            stored_keys, stored_values = read_as_computed(probe.model, probe.layers[name], slots)
            if rules.latent:
                stored_values = stored_keys[..., : rules.latent]
            both = (
                torch.cat([old.to(new.dtype), new[places]]) for old, new in ((stored_keys, key), (stored_values, value))
            )
            keys = Keys(prompt.key_positions, *both)
            received = torch.zeros(len(keys.positions), device=total.device) if name in probe.counted else None
            taken = attend(query[places], prompt.positions, keys, rules, received)
            output[places] = taken.to(output.dtype)
            if received is not None:
                total[prompt.stored] += received[: len(prompt.stored)]
        if name == self._last:
            raise StopForward


class _Prompt:
    """Where the tokens of one prompt stand: in the forward, in the prompt and in the pages."""

    def __init__(self, model: EngineModel, query: AttentionQuery, chosen: RecomputeSet, number: int) -> None:
        places = chosen.places(number)
        self.places = model.sent(places)
        self.positions = model.sent(chosen.positions[places])
        stored = RecomputeSet([query.asking._replace(spans=query.stored)])
        self.stored = model.sent(stored.positions)
        self.slots = model.slots_of_tables(stored)
        self.key_positions = torch.cat([self.stored, self.positions])
