"""Layers of vLLM with Kimi delta attention, in a process of their own: ``python -m tests.vllm.kimi_delta_layers KIND``
prints how far off BlendHub's maps of texts are, as JSON.

The kernels of the recurrence are vLLM's, in Triton's interpreter; convolutions are vLLM's for CPUs. Where a wrapper
insists on a GPU, plain torch stands in.
"""

from tests.vllm import kernels_in_interpreter  # noqa: F401  # isort: skip  # before vLLM

import json
import sys
import tempfile
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.model_executor.models import bailing_moe_v3
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from blendhub import Span
from blendhub.core.errors import Unsupported
from blendhub.vllm.model.states.maps import check_maps, packed, recurrent_layer, unpacked
from blendhub.vllm.model.states.recurrent_layer import SCRATCH, MapInMaking, SpanStates
from blendhub.vllm.model.states.state_path import PlacedMap, StatePath, own_recurrence, steps_of
from tests.vllm.kimi_stand_ins import gathered

HEADS, WIDTH, HISTORY, TOKENS = 2, 16, 3, 100
NAME, PLAIN, OURS = "model.layers.0.self_attn", 2, 3
"""The layer, and the rows of the states of vLLM's request and of BlendHub's."""


def overwriting(x, *others, **named):
    """The convolution of a token writes its result into its input, as that for GPUs does."""
    return x.copy_(causal_conv1d_update(x, *others, **named))


def kimi_linear(config):
    setattr(kimi_gdn_linear_attn, "gather_initial_states", gathered)  # noqa: B010
    kda = {"head_dim": WIDTH, "num_heads": HEADS, "short_conv_kernel_size": HISTORY + 1}
    shape = KimiLinearConfig(
        hidden_size=32, num_attention_heads=HEADS, linear_attn_config=kda | {"kda_layers": [1], "full_attn_layers": [2]}
    )
    inputs = {
        "mixed_qkv": torch.randn(TOKENS, 3 * HEADS * WIDTH),
        "g1": torch.randn(1, TOKENS, HEADS, WIDTH) - 3,
        "g2": torch.randn(TOKENS, HEADS, WIDTH),
        "beta": torch.randn(1, TOKENS, HEADS),
    }
    return kimi_gdn_linear_attn.KimiGatedDeltaNetAttention(shape, config, NAME), inputs


def ling(config):
    setattr(bailing_moe_v3, "causal_conv1d_update", overwriting)  # noqa: B010
    shape: Any = SimpleNamespace(
        hidden_size=32, head_dim=WIDTH, num_attention_heads=HEADS, short_conv_kernel_size=HISTORY + 1,
        rms_norm_eps=1e-6, no_kda_lora=True,
    )  # fmt: skip
    of_model = {"model_config": config.model_config, "cache_config": config.cache_config}
    inputs = {f"{part}_proj_states": torch.randn(TOKENS, HEADS * WIDTH) for part in "qkv"}
    inputs |= {"g1": -torch.rand(1, TOKENS, HEADS, WIDTH) / 10, "beta": torch.rand(1, TOKENS, HEADS)}
    return bailing_moe_v3.BailingMoeV3KimiDeltaAttention(shape, prefix=NAME, **of_model), inputs


KINDS = {"Kimi Linear": kimi_linear, "Ling 3": ling}


class Layer:
    """A layer with random weights, and random inputs of its operator for each token that there is."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.config, model = VllmConfig(), SimpleNamespace(dtype=torch.float32, is_moe=False)
        setattr(self.config, "model_config", model)  # noqa: B010
        with set_current_vllm_config(self.config), tempfile.NamedTemporaryFile() as file:
            init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
            initialize_model_parallel(1)
            made: tuple[Any, dict[str, torch.Tensor]] = KINDS[kind](self.config)
        self.layer, self._inputs = made
        for name, weights in self.layer.named_parameters():
            weights.data.fill_(1.0) if "norm" in name else weights.data.normal_(0, 0.5)
        dtypes = self.layer.get_state_dtype()
        shapes = self.layer.get_state_shape()
        self.layer.kv_cache = [torch.zeros(4, *of, dtype=dtype) for of, dtype in zip(shapes, dtypes, strict=True)]
        self.own: Any = recurrent_layer(NAME, self.layer)

    def metadata(self, span: Span, row: int) -> GDNAttentionMetadata:
        """Those of a request whose next tokens are a span: one token behind others is one of an answer."""
        n, decodes = len(span), int(len(span) == 1 and span.start > 0)
        starts = torch.tensor([0, n], dtype=torch.int32)
        none = GDNAttentionMetadata(
            num_prefills=1 - decodes, num_prefill_tokens=0 if decodes else n, num_decodes=decodes,
            num_decode_tokens=decodes, num_spec_decodes=0, num_spec_decode_tokens=0, num_actual_tokens=n,
            non_spec_query_start_loc=starts, non_spec_state_indices_tensor=torch.tensor([row], dtype=torch.int32),
        )  # fmt: skip
        if decodes:
            return none
        chunks, batch, offsets = compute_causal_conv1d_metadata(starts, device=torch.device("cpu"))
        begins = torch.tensor([span.start > 0])
        return replace(
            none, has_initial_state=begins, nums_dict=chunks, batch_ptr=batch, token_chunk_offset_ptr=offsets
        )

    def states(self, span: Span) -> dict[str, SpanStates]:
        return {NAME: SpanStates(OURS, self.metadata(span, OURS), self.metadata(span, SCRATCH))}

    def call(self, tokens: list[int]) -> torch.Tensor:
        """What the model itself calls, in the current context."""
        ids = torch.tensor(tokens)
        given = {
            name: rows[:, ids] if name in ("g1", "beta") else rows[ids].contiguous()
            for name, rows in self._inputs.items()
        }
        output = torch.empty(1, len(tokens), HEADS, WIDTH)
        self.layer._forward(**given, core_attn_out=output)
        return output[0]

    def plainly(self, prompt: list[int]) -> torch.Tensor:
        """vLLM computes a prompt at once; its state is then in row ``PLAIN``."""
        with set_forward_context({NAME: self.metadata(Span(0, len(prompt)), PLAIN)}, self.config):
            return self.call(prompt)

    def compute(self, prompt: list[int], spans: list[Span], path: StatePath) -> torch.Tensor:
        """BlendHub computes spans of a prompt, and goes over the rest by maps; its state is in row ``OURS``."""
        steps = steps_of([0] * len(spans), spans, [path], lambda owner, span, makes_map: self.states(span))
        with set_forward_context({}, self.config), own_recurrence([self.own], steps):
            return self.call([token for span in spans for token in prompt[span.start : span.end]])

    def error(self) -> float:
        """How far BlendHub's state is off from vLLM's, of the state and of the convolution, whichever is worse."""
        return max(
            float((states[OURS] - states[PLAIN]).norm() / states[PLAIN].norm()) for states in self.layer.kv_cache
        )


def main(kind: str) -> None:
    layer = Layer(kind)
    # The first tokens of a text are its seam: its convolution is filled with them when its map begins.
    texts = [list(range(start, start + n)) for start, n in ((10, 8), (40, 17))]
    maps: list[dict[str, torch.Tensor]] = []
    found: dict[str, Any] = {}
    for text in texts:
        prompt, body = [1, 2, 3, *text], Span(3 + HISTORY, 3 + len(text))
        # A last token by itself is one of an answer to vLLM.
        parts = [Span(body.start, body.end - 1), Span(body.end - 1, body.end)]
        for spans, tried in (([body], {}), (parts, None)):
            making = MapInMaking(body, tried=tried)
            layer.compute(prompt, [Span(0, body.start), *spans], StatePath(0, len(prompt), making=[making]))
            check_maps(making, [layer.own], 1e-4)
            if tried is not None:
                layer.own._rows_are_keys = True
                try:
                    check_maps(making, [layer.own], 0.04)
                except Unsupported as error:
                    found["refusal"] = str(error)
                layer.own._rows_are_keys = False
        layer.plainly(prompt)
        found["made"] = max(found.get("made", 0), layer.error())
        maps.append(unpacked(packed(making, [layer.own]), [layer.own]))
    found["composed"], found["behind"] = 0.0, 0.0
    for order in permutations(range(len(texts))):
        prompt, spans = [5, 6], [Span(0, 2)]
        placed: list[PlacedMap] = []
        for number in order:
            seam = Span(len(prompt), len(prompt) + HISTORY)
            prompt += texts[number]
            placed.append(PlacedMap(Span(seam.end, len(prompt)), maps[number]))
            spans.append(seam)
        question = Span(len(prompt), len(prompt) + 1)
        prompt.append(7)
        computed = layer.compute(prompt, [*spans, question], StatePath(0, len(prompt), placed))
        expected = layer.plainly(prompt)
        found["composed"] = max(found["composed"], layer.error())
        found["behind"] = max(found["behind"], float((computed[-1] - expected[-1]).norm() / expected[-1].norm()))
    found["is_left_alone"] = "_forward" not in vars(layer.layer)
    # A text's map is needed: nothing of what stood before it is forgotten.
    layer.compute(prompt, [*spans, question], StatePath(0, len(prompt)))
    found["without_maps"] = layer.error()
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
