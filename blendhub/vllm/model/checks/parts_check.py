"""The start-up check of chosen tokens: computed in parts, they get the KV that they get at once.

Rounding depends on the shape of a batch, and near ties between experts turn it into large differences of single tokens.
So the check compares with the differences that shapes alone make, which it measures on the loaded model.
"""

from collections.abc import Sequence

import numpy as np
import torch

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.page_trial import COARSE
from blendhub.vllm.model.pages import LayerPages, read_as_computed
from blendhub.vllm.model.platform import Tensors
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.states.maps import check_maps, packed, unpacked
from blendhub.vllm.model.states.recurrent_layer import MapInMaking
from blendhub.vllm.model.states.state_path import PlacedMap, StatePath

TOKEN = 7
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
NOISE_FACTOR = 3
"""How much more than the measured noise is allowed: a few shapes do not show all of it."""


def trial_tokens(model: EngineModel) -> Tokens:
    """Tokens that fit in one block."""
    n = min(*model.block_sizes, 12, model.config.model_config.max_model_len)
    return np.arange(TOKEN, TOKEN + n, dtype=np.uint32) % 97


def trial_part(
    model: EngineModel, tokens: Tokens, spans: Sequence[Span], path: StatePath | None = None
) -> RequestTokens:
    """Tokens of a prompt of one block in each block table: the one that vLLM never gives to a request, and those behind
    it, because block tables share the memory of their blocks. In models with recurrent layers, spans follow each other.
    """
    # To kernels of recurrent layers, the first block stands for no state.
    blocks = [np.array([table + bool(model.recurrent)]) for table in range(len(model.block_sizes))]
    if model.recurrent:
        path = path or StatePath(spans[0].start, spans[-1].end)
    return RequestTokens(tokens, blocks, spans, path)


def tolerance(layer: LayerPages) -> float:
    """How far KV of the layer may be off."""
    return TOLERANCE.get(layer.dtype, COARSE)


def check_parts(model: EngineModel, layers: Sequence[LayerPages]) -> None:
    """Raise Unsupported if tokens that are computed as several spans get other KV than in one span."""
    n = len(trial_tokens(model))
    if n < 4:
        return
    whole = computed(model, layers, [Span(0, n)])
    noise: list[list[torch.Tensor]] = [[] for _ in layers]
    for m in range(n - 1, 1, -1):
        fewer = computed(model, layers, [Span(0, m)])
        for errors, kv, all_at_once in zip(noise, fewer, whole, strict=True):
            errors.append(_errors(kv, all_at_once, m))
    # Each part is computed behind the KV that the others have had at once.
    computed(model, layers, [Span(0, n)])
    first, others = ([Span(0, 1), Span(2, 3)], [Span(1, 2), Span(3, n)])
    if model.recurrent:  # whose tokens have their order
        first, others = [Span(0, 1), Span(1, 2)], [Span(2, 3), Span(3, n)]
    computed(model, layers, first)
    _compare(layers, computed(model, layers, others), whole, noise, "computed in parts")
    if model.recurrent:
        _compare(layers, _behind_a_map(model, layers), whole, noise, "computed behind the map of a text")


def _behind_a_map(model: EngineModel, layers: Sequence[LayerPages]) -> list[Tensors]:
    """The KV of all trial tokens, of which the last ones were computed behind a state that went over those before by
    their map. Operators take a last token by itself for an answer's, and compute it otherwise."""
    tokens, n = trial_tokens(model), len(trial_tokens(model))
    text = Span(2, n - 2)
    for spans, tried in (([text], {}), ([Span(2, n - 3), Span(n - 3, n - 2)], None)):
        making, spans = MapInMaking(text, tried=tried), [Span(0, 2), *spans]
        model.forward(RecomputeSet([trial_part(model, tokens, spans, StatePath(0, n - 2, making=[making]))]))
        check_maps(making, model.recurrent_layers, tolerance(layers[0]))
    maps = unpacked(packed(making, model.recurrent_layers).cpu(), model.recurrent_layers)
    path = StatePath(0, n, [PlacedMap(text, maps)])
    model.forward(RecomputeSet([trial_part(model, tokens, [Span(0, 2), Span(n - 2, n)], path)]))
    return _kv(model, layers)


def _compare(
    layers: Sequence[LayerPages],
    kv: Sequence[Tensors],
    whole: Sequence[Tensors],
    noise: Sequence[Sequence[torch.Tensor]],
    what: str,
) -> None:
    """Raise Unsupported if the KV of tokens is farther off from what it is computed at once than shapes explain."""
    for at, layer in enumerate(layers):
        shapes, errors_of_parts = torch.cat(list(noise[at])), _errors(kv[at], whole[at], len(whole[at][0]))
        for which, share in (("most", 0.25), ("some", 1.0)):
            usual, error = (float(torch.quantile(errors, share)) for errors in (shapes, errors_of_parts))
            allowed = max(tolerance(layer), NOISE_FACTOR * usual)
            if not error <= allowed:
                raise Unsupported(
                    f"{layer.name}: {which} tokens {what} are off by {error:.1%} from those computed at once "
                    f"(allowed {allowed:.1%})"
                )
            if which == "most" and usual > COARSE:
                raise Unsupported(
                    f"{layer.name}: the number of tokens in a forward changes the KV of most tokens by {usual:.1%}, "
                    "so that it cannot be checked whether chosen tokens are computed right"
                )


def computed(model: EngineModel, layers: Sequence[LayerPages], spans: Sequence[Span]) -> list[Tensors]:
    """The KV of all trial tokens in each layer, after these were computed."""
    model.forward(RecomputeSet([trial_part(model, trial_tokens(model), spans)]))
    return _kv(model, layers)


def _kv(model: EngineModel, layers: Sequence[LayerPages]) -> list[Tensors]:
    tokens = trial_tokens(model)
    whole = RecomputeSet([trial_part(model, tokens, [Span(0, len(tokens))])])
    return [read_as_computed(model, layer, model.slots(whole, number)) for number, layer in enumerate(layers)]


def _errors(actual: Tensors, expected: Tensors, n: int) -> torch.Tensor:
    """The error of the KV of each of the first ``n`` tokens, relative to the largest expected value."""
    worst = torch.zeros(n, dtype=torch.float64)
    for rows, expected_rows in zip(actual, expected, strict=True):
        if expected_rows.numel():
            scale = float(expected_rows.abs().max()) or 1.0
            errors = (rows[:n].double() - expected_rows[:n].double()).abs().flatten(1).amax(1).cpu() / scale
            worst = torch.maximum(worst, errors.nan_to_num(nan=torch.inf))
    return worst
