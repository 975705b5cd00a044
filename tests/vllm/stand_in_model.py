"""A model that does with its pages what ``EngineModel`` promises, computed by plain torch on all ranks together."""

from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from blendhub.contracts import Rotation
from blendhub.vllm.model.rotary import rotated, rotations_of
from tests.stand_in import Anything, StandIn

HEADS, WIDTH, BLOCK, BLOCKS, LONGEST = 2, 16, 16, 4, 4096


@cache
def rotary(n_positions: int = LONGEST, base: float = 10000.0, width: int = WIDTH) -> RotaryEmbedding:
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(width, width, n_positions, base, True, torch.float32)


def config_of(**changes: Any) -> Any:
    """What BlendHub reads of vLLM's configuration of a usual model, with these fields changed."""
    ones = ["pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_size"]
    usual = dict.fromkeys(ones, 1) | dict.fromkeys(["is_moe_model", "is_encoder_decoder", "enable_sleep_mode"], False)
    fields = StandIn(dtype=torch.float32, max_model_len=LONGEST, get_total_num_kv_heads=lambda: 1, **usual | changes)
    return SimpleNamespace(
        parallel_config=fields,
        model_config=fields,
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


class StandInModel(Anything):
    """Keys depend on token and position, values on the token. ``together`` is called in every forward."""

    max_tokens, max_spans = 4096, 64
    device = torch.device("cpu")
    frees_blocks_early = samples_last = has_indexer = False
    adapters, attention, why_no_drafts = None, (), ""
    dtype = torch.float32
    block_size = BLOCK
    recurrent: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        together: Any = lambda tensor: tensor,
        base: float = 10000.0,
        n_layers: int = 2,
        heads: int = HEADS,
        width: int = WIDTH,
        n_blocks: int = BLOCKS,
    ) -> None:
        self.block_sizes: tuple[int, ...] = (self.block_size,)
        self.layer_names = [f"layers.{number}.attn" for number in range(n_layers)]
        self.tables = dict.fromkeys(self.layer_names, 0)
        self.page_sizes = dict.fromkeys(self.layer_names, self.block_size)
        self._layers = {
            name: StandIn(
                num_kv_heads=heads,
                head_size=width,
                impl=None,
                kv_cache=torch.zeros(n_blocks, heads, self.block_size, 2 * width),
                get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "ANY"),
            )
            for name in self.layer_names
        }
        self._together = together
        self.module = torch.nn.Module()
        self.module.rotary = rotary(base=base, width=width)
        self._rotation: Rotation = rotations_of(self.module, width, LONGEST)[0]
        self._embedding = torch.randn(1000, 2 * n_layers, heads, width, generator=torch.Generator().manual_seed(1))
        self.config = config_of()

    @property
    def pages(self) -> list[torch.Tensor]:
        """The pages of each layer."""
        return [layer.kv_cache for layer in self._layers.values()]

    @property
    def n_own_layers(self) -> int:
        return len(self.layer_names)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.module]

    def chunk_tokens(self, most: int) -> int:
        return most

    def rules(self):
        return self.layer_names

    def layer(self, name):
        return self._layers[name]

    def unscaled(self, name, keys, values):
        return keys, values

    def slots(self, chosen, layer=0):
        return torch.from_numpy(chosen.slots(self.block_size))

    def write(self, index, keys, values, slots):
        self.pages[index][slots // self.block_size, :, slots % self.block_size] = torch.cat([keys, values], -1)

    def forward(self, chosen, *, positions=None):
        self._together(torch.ones(1))
        for index in range(len(self.layer_names)):
            keys, values = self.computed(index, chosen, positions)
            self.write(index, keys, values, self.slots(chosen))

    def forward_until(self, layer, chosen):
        self._together(torch.ones(1))
        return self.computed(layer, chosen)

    def computed(self, index, chosen, positions=None):
        """The KV of a layer."""
        rows = self._embedding[torch.from_numpy(chosen.ids.astype("int64"))]
        new = torch.from_numpy(chosen.positions) if positions is None else positions
        return rotated(rows[:, 2 * index], self._rotation, torch.zeros_like(new), new), rows[:, 2 * index + 1]
