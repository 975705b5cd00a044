"""Start-up checks on the loaded model: where its KV lies, whether keys can be moved, and what cannot be reused.

They end before the first request, so trial writes may go to any block.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from blendhub.contracts import Rotation, Selector
from blendhub.core.errors import BlendHubError, Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.attention_probe import AttentionProbe, AttentionQuery, ProbeAttention
from blendhub.vllm.model.checks.copies import count_copies, digest_of_kv, ranks_of_a_head
from blendhub.vllm.model.checks.parts_check import NOISE_FACTOR, TOKEN, check_parts, tolerance, trial_part, trial_tokens
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.fingerprint import fingerprint
from blendhub.vllm.model.layer_groups import LayerGroup, StateGroup, layer_groups, pages_of
from blendhub.vllm.model.page_trial import COARSE, error_of, misplaced
from blendhub.vllm.model.pages import BYTES, LayerPages, read_as_computed
from blendhub.vllm.model.platform import Tensors
from blendhub.vllm.model.recompute_set import RecomputeSet
from blendhub.vllm.model.rotary import digest, rotated, rotations_of
from blendhub.vllm.model_support import ModelSupport, unsupported
from blendhub.vllm.ranks import Ranks

log = logging.getLogger(__name__)
Result = TypeVar("Result")
ONLY_PREFIXES = (
    "exact prefixes only: the model has recurrent layers, of which text is moved with policy.moves_states only; "
    "`blendhub advise` measures with your model what that does to its answers"
)
BESIDE_OTHERS = "exact prefixes only: text of models with recurrent layers is not moved beside other connectors"
SEAMS_ONLY = (
    "text moves with the maps of its states: the first tokens behind each border are computed, and the selector picks "
    "none, because no state is known inside of a text"
)


class ModelCheck(NamedTuple):
    """The result of the start-up checks."""

    support: ModelSupport
    rotations: tuple[Rotation | None, ...] = ()
    """Each layer's rotation of its keys, in the model's order; empty unless the model blends."""
    measures_attention: bool = False
    """Whether it can be measured what a prompt's end attends to, for a selector that asks."""


def groups_and_rotations(model: EngineModel, chunk_tokens: int) -> tuple[tuple[LayerGroup, ...], list[Rotation]]:
    """The groups of a rank's layers, and the rotations that their keys may have; raises Unsupported.

    Runs no forward.
    """
    _refuse_to_reuse(model)
    groups = layer_groups(model, chunk_tokens)
    can_move = all(group.layout.dtype != BYTES for group in groups)
    return groups, possible_rotations(model, groups) if can_move else []


def possible_rotations(model: EngineModel, groups: Sequence[LayerGroup]) -> list[Rotation]:
    """The rotations that keys of these widths may have in the model."""
    n_positions, rotations = model.config.model_config.max_model_len, dict[str, Rotation]()
    for width in dict.fromkeys(group.layout.key_dim for group in groups):
        for module in model.modules:
            rotations |= {digest(rotation): rotation for rotation in rotations_of(module, width, n_positions)}
    return list(rotations.values())


def check_model(
    model: EngineModel,
    groups: Sequence[LayerGroup],
    candidates: Sequence[Rotation],
    selector: Selector,
    ranks: Ranks,
    states: Sequence[StateGroup] = (),
    *,
    unmoved_states: str = ONLY_PREFIXES,
) -> ModelCheck:
    """Check the layout, the computation of chosen tokens, the selector's probes, and the rotation of keys.

    ``unmoved_states``: why text does not move in a model with recurrent layers; empty: it may.

    Every rank runs each check to its end, and all agree before the next: one that went on alone would wait in its next
    forward for the others.
    """
    layouts, state_layouts = tuple(group.layout for group in groups), tuple(group.layout for group in states)
    layers = pages_of(model, groups)
    try:
        _checked(ranks, "writing into the pages, and reading back,", lambda: _check_layout(model, layers))
    except BlendHubError as error:
        return ModelCheck(unsupported(str(error)))
    if states and unmoved_states:
        return ModelCheck(ModelSupport(layouts, False, (unmoved_states,), state_layouts))
    forward, copies = "a forward over chosen tokens", 1
    try:
        _refuse_to_blend(model)
        if any(layout.dtype == BYTES for layout in layouts):
            dtype = model.config.cache_config.cache_dtype
            raise Unsupported(f"only vLLM's kernels can read KV of the dtype {dtype!r}, so that keys cannot be moved")
        # Several tokens first: a model that vLLM has not warmed up would be compiled for one token only.
        if ranks.count > 1 and not states:
            kv = ranks.gather(_checked(ranks, forward, lambda: digest_of_kv(model, layers)))
            copies = count_copies(kv, ranks.gather(fingerprint(model.module)))
            n_holders = ranks_of_a_head(model, ranks.count)
            if ranks.number == 0 and kv.count(kv[0]) < n_holders:
                log.info(
                    "KV is stored %d times: vLLM has each head of it on %d ranks, which do not compute the same "
                    "to the bit", n_holders // copies, n_holders,
                )  # fmt: skip
        _checked(ranks, forward, lambda: check_parts(model, layers))
        without_attention: tuple[str, ...] = ()
        if states:
            without_attention = (SEAMS_ONLY,)
        else:
            if selector.probe_layer:
                _checked(ranks, forward, lambda: _check_probe(model, layers, selector.probe_layer))
            without_attention = _refusal_of_attention(model, layers, selector, ranks)
        fits = _checked(ranks, forward, lambda: _rotation_errors(model, layers, [None, *candidates]))
        rotations = _chosen_rotations(fits, layers, [None, *candidates], ranks)
    except BlendHubError as error:
        reason = f"{error}; exact prefixes are reused all the same"
        return ModelCheck(ModelSupport(layouts, False, (reason,), state_layouts, copies=copies))
    measures_attention = bool(selector.attended_layers) and not without_attention
    support = ModelSupport(layouts, True, without_attention, state_layouts, copies=copies)
    return ModelCheck(support, rotations, measures_attention)


def _checked(ranks: Ranks, what: str, check: Callable[[], Result]) -> Result:
    def run() -> Result:
        try:
            return check()
        except BlendHubError:
            raise
        except Exception as error:  # a model or backend of a new kind may still serve vLLM's own requests
            log.exception("%s failed", what)
            raise Unsupported(f"{what} failed: {type(error).__name__}: {error}") from error

    return ranks.together(run)


def _refuse_to_reuse(model: EngineModel) -> None:
    """Raise Unsupported if nothing can be reused with this model and vLLM's configuration."""
    config, parallel = model.config, model.config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline parallelism is not supported; use tensor parallelism, or serve without BlendHub")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("context parallelism is not supported; its ranks hold parts of a block")
    if config.model_config.is_encoder_decoder:
        raise Unsupported("encoder-decoder models are not supported")
    if model.recurrent and not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"):
        raise Unsupported(
            "the model has recurrent layers, and this vLLM clears blocks of such models after a connector has loaded "
            "them; exact prefixes are reused from vLLM 0.32 on"
        )
    # vLLM's allocator for sleep mode also serves ``release_kv_cache_memory`` without it.
    is_unmapped = config.model_config.enable_sleep_mode or getattr(config.model_config, "enable_cumem_allocator", False)
    if is_unmapped and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        raise Unsupported(
            "with enable_sleep_mode or enable_cumem_allocator this vLLM may unmap the KV cache while KV is being "
            "copied; serve without both to reuse KV, or with vLLM 0.33, which tells a connector before"
        )


def _refuse_to_blend(model: EngineModel) -> None:
    """Raise Unsupported if the model or its configuration rules out forwards over chosen tokens."""
    parallel = model.config.parallel_config
    if model.has_indexer:
        raise Unsupported(
            "attention reads the tokens that an indexer picks by keys of 8 bits, which cannot be turned to other "
            "positions without computing them anew"
        )
    if model.why_no_drafts:
        raise Unsupported(model.why_no_drafts)
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        raise Unsupported("the experts are spread over data-parallel engines, which must step together")
    if any(hasattr(part, "deepstack_input_embeds") for part in model.module.modules()):
        raise Unsupported(
            "the model adds features of images behind several layers; vLLM keeps them from the embedding of a step to "
            "its forward, and a forward of BlendHub in between would take them"
        )


def _check_layout(model: EngineModel, layers: Sequence[LayerPages]) -> None:
    """A layer's writes must be read back from where BlendHub expects them."""
    for index, layer in enumerate(layers):
        if what := misplaced(model, index, layer):
            raise Unsupported(
                f"{layer.name}: {what} are not where BlendHub expects them in pages of format "
                f"{layer.paged.format!r} (attention backend "
                f"{model.layer(layer.name).get_attn_backend().get_name()}); nothing is reused with this backend"
            )


def _rotation_errors(
    model: EngineModel, layers: Sequence[LayerPages], candidates: Sequence[Rotation | None]
) -> torch.Tensor:
    """How far each layer's keys are off if a candidate rotates them to other positions: ``[layers, candidates]``.

    It takes a single token: attention then returns the token's own value at any position. So hidden states are equal
    at all positions, and keys differ by the rotation only.
    """
    longest = model.config.model_config.max_model_len - 1
    places = sorted({min(3, longest), min(1234, longest), longest // 2, longest})
    seen = [_keys_of_one_token(model, layers, place) for place in places]
    errors = torch.zeros(len(layers), len(candidates), dtype=torch.float64)
    for index in range(len(layers)):
        keys = [keys[index] for keys, _ in seen]
        values = [values[index] for _, values in seen]
        errors_of_values = max(error_of(value, values[0]) for value in values)
        for number, rotation in enumerate(candidates):
            errors[index, number] = max(_worst_rotation_error(keys, places, rotation), errors_of_values)
    return errors


def _chosen_rotations(
    errors: torch.Tensor, layers: Sequence[LayerPages], candidates: Sequence[Rotation | None], ranks: Ranks
) -> tuple[Rotation | None, ...]:
    """The rotation of each layer that fits best on the rank where it fits worst: the same on all ranks.

    Where attention has sinks, rounding makes hidden states differ between positions, and each layer adds to that. So a
    layer may be ``NOISE_FACTOR`` times as far off as the one before, up to what 8-bit floats may be.
    """
    names = " ".join(map(digest, candidates))
    for number, others in enumerate(ranks.gather(names)):
        if others != names:
            raise Unsupported(
                f"keys cannot be moved: the rotary embeddings of the ranks {ranks.number} and {number} differ"
            )
    chosen = ranks.largest(errors).argmin(1).tolist()
    error = 0.0
    for layer, mine in zip(layers, errors[range(len(layers)), chosen].tolist(), strict=True):
        allowed = max(tolerance(layer), min(NOISE_FACTOR * error, COARSE))
        errors_of_ranks = list(map(float, ranks.gather(str(mine))))
        error = max(errors_of_ranks)
        if error > allowed:
            raise Unsupported(
                f"keys of {layer.name} cannot be moved: rotated to another position they are off by {error:.1%} "
                f"(allowed {allowed:.1%}){ranks.named(errors_of_ranks.index(error))}"
            )
    return tuple(candidates[best] for best in chosen)


def _keys_of_one_token(
    model: EngineModel, layers: Sequence[LayerPages], place: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    chosen = RecomputeSet([trial_part(model, np.array([TOKEN], np.uint32), [Span(0, 1)])])
    model.forward(chosen, positions=torch.tensor([place]))
    both = [read_as_computed(model, layer, model.slots(chosen, number)) for number, layer in enumerate(layers)]
    return [keys for keys, _ in both], [values for _, values in both]


def _worst_rotation_error(keys: list[torch.Tensor], places: list[int], rotation: Rotation | None) -> float:
    if rotation is not None:
        n_positions, width = rotation.cos_sin.shape
        # Another layer's keys may be wider.
        if places[-1] >= n_positions or rotation.offset + width > keys[0].shape[-1]:
            return float("inf")
    return max(
        error_of(rotated(first, rotation, torch.tensor([old]), torch.tensor([new])), second)
        for first, old in zip(keys, places, strict=True)
        for second, new in zip(keys, places, strict=True)
        if old != new
    ) if len(places) > 1 else 0.0  # fmt: skip


def _check_probe(model: EngineModel, layers: Sequence[LayerPages], probe_layer: int) -> None:
    """The KV that a probe returns must be the KV that the layer would have written."""
    if probe_layer >= model.n_own_layers:
        raise Unsupported(
            f"the selector probes layer {probe_layer}, but the model has {model.n_own_layers} layers; "
            "choose a selector without a probe, such as first_k"
        )
    tokens, layer = trial_tokens(model), layers[probe_layer]
    whole = RecomputeSet([trial_part(model, tokens, [Span(0, len(tokens))])])
    model.forward(whole)
    written = read_as_computed(model, layer, model.slots(whole, probe_layer))
    seen = model.forward_until(probe_layer, whole)
    _compare(layer, seen, written, "the probed KV is off by {} from what the layer writes")


def _refusal_of_attention(
    model: EngineModel, layers: Sequence[LayerPages], selector: Selector, ranks: Ranks
) -> tuple[str, ...]:
    """Why the selector must pick without what it asks for; empty if it asks for nothing, or gets it."""
    depths = selector.attended_layers
    if not depths:
        return ()
    try:
        _checked(ranks, "the probe of attention", lambda: _check_attention(model, layers, depths))
    except BlendHubError as error:
        return (f"the selector picks without knowing what the end of a prompt attends to: {error}",)
    return ()


def _check_attention(model: EngineModel, layers: Sequence[LayerPages], depths: Sequence[float]) -> None:
    """Tokens that only ask must get the KV that the model's own attention leads to."""
    probe, tokens = AttentionProbe(model, layers, depths), trial_tokens(model)
    n = len(tokens)
    whole, half = trial_part(model, tokens, [Span(0, n)]), Span(0, n // 2)
    model.forward(RecomputeSet([whole]))
    asked = whole._replace(spans=[Span(half.end, n)])
    attention = ProbeAttention(probe, [AttentionQuery(asked, [half])])
    seen: dict[str, Tensors] = {}

    def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        seen[layer.layer_name] = key.clone(), value[..., : probe.layers[layer.layer_name].layout.value_dim].clone()
        attention(layer, query, key, value, output)

    model.forward_apart(attention.chosen, list(probe.layers), attend)
    for number, (name, layer) in enumerate(probe.layers.items()):
        written = read_as_computed(model, layer, model.slots(RecomputeSet([asked]), number))
        _compare(layer, seen[name], written, "tokens that ask get KV that is off by {} from what the model computes")


def _compare(layer: LayerPages, actual: Tensors, expected: Tensors, complaint: str) -> None:
    for rows, expected_rows in zip(actual, expected, strict=True):
        if error_of(rows, expected_rows) > tolerance(layer):
            raise Unsupported(f"{layer.name}: {complaint.format(f'{error_of(rows, expected_rows):.1%}')}")
