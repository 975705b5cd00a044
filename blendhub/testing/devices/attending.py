"""Attention for chosen tokens, held against plain torch. Devices without it skip these tests."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens, Device, PagedLayer, PageFormat
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.testing.device_reference import page_shapes, torch_type
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.sentences import holds

RULES = AttentionRules(heads=4, scale=0.2)
LAYOUT = KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype="float32", chunk_tokens=16)
LATENT = KVLayout(layers=1, kv_heads=1, key_dim=576, value_dim=0, dtype="float32", chunk_tokens=16)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def spread_out(n: int, end: int, seed: int = 1) -> list[int]:
    """So many different positions before ``end``, in any order."""
    positions: list[int] = np.random.default_rng(seed).choice(end, n, replace=False).tolist()
    return positions


class AttentionCase:
    """Prompts whose chosen tokens ask, with random keys and values in pages of any order.

    There are two layers, of which the second has twice the scale.
    """

    def __init__(
        self,
        device: Device,
        torch_type_of_device: str,
        chosen: Sequence[Sequence[int]],
        rules: AttentionRules = RULES,
        *,
        layout: KVLayout = LAYOUT,
        format: PageFormat = "packed_heads",
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        random, place = torch.Generator().manual_seed(3), torch.device(torch_type_of_device)
        needed = -(-max(max(positions) + 1 for positions in chosen) // block_size)
        n_blocks = len(chosen) * needed + 3
        blocks = torch.randperm(n_blocks, generator=random)[:-3].view(len(chosen), needed)
        layout = msgspec.structs.replace(layout, layers=2)
        pages = [
            tuple(
                (torch.randn(shape, generator=random) / 2).to(torch_type(layout.dtype)).to(place)
                for shape in page_shapes(format, n_blocks, block_size, layout)
            )
            for _ in range(layout.layers)
        ]
        layers = [PagedLayer(f"layer {number}", format, tensors) for number, tensors in enumerate(pages)]
        positions = np.array([at for positions in chosen for at in positions])
        prompts = np.repeat(np.arange(len(chosen)), [len(positions) for positions in chosen])
        any_order = np.random.default_rng(4).permutation(len(positions))
        blocks_here = blocks.numpy().astype(np.int32)
        self.tokens = ChosenTokens(positions[any_order], prompts[any_order], blocks_here)
        if rules.sinks is not None:
            rules = rules._replace(sinks=rules.sinks.to(place))
        # A view of a wider tensor, as engines have it.
        shape = len(positions), rules.heads, 2 * layout.key_dim
        self.queries = torch.randn(shape, generator=random).to(dtype).to(place)[..., : layout.key_dim]
        self.value_width = rules.latent or layout.value_dim
        if type(device).attention is Device.attention:
            pytest.skip("the device has no attention")
        self.rules = [rules, rules._replace(scale=2 * rules.scale)]
        device.attach(layers, block_size, layout)
        self.attention = device.attention(self.rules, dtype)
        self.reference = ReferenceAttention(layers, block_size, layout, self.rules)

    def check(self) -> None:
        if self.attention is None:
            pytest.skip("the device has no attention")
        found, expected = self._answers(self.attention), self._answers(self.reference)
        assert (found - expected).abs().max() < TOLERANCE[self.queries.dtype]

    def _answers(self, attention: ChosenAttention) -> torch.Tensor:
        """The answers of both layers in the second of two forwards. They are part of a wider tensor."""
        tokens, shape = self.tokens, (len(self.rules), *self.queries.shape[:2], 2 * self.value_width)
        output = self.queries.new_full(shape, torch.nan)
        attention.begin(ChosenTokens(tokens.positions[:1], tokens.prompts[:1], tokens.blocks[::-1].copy()))
        attention.begin(tokens)
        for layer in range(len(self.rules)):
            attention.attend(layer, self.queries, output[layer, ..., : self.value_width])
        assert output[..., self.value_width :].isnan().all(), "bytes behind the answers were written"
        return output[..., : self.value_width].float()


CHOSEN = {
    "single tokens": [spread_out(70, 200)],
    "spans of four": [[at for start in range(3, 190, 13) for at in range(start, start + 4)]],
    "one span of all": [list(range(150))],
    "the first token and the last": [[0, 199]],
    "several prompts": [spread_out(5, 180), [0], spread_out(40, 60, 2), list(range(100, 120))],
}
SINKS = torch.tensor([0.5, -1.0, 2.0, 9.0])
OTHER_RULES = {
    "a head of keys for each": RULES._replace(heads=2),
    "a window": RULES._replace(window=37),
    "a window of one token": RULES._replace(window=1),
    "chunks": RULES._replace(chunk=48),
    "a soft cap": RULES._replace(soft_cap=2.0, scale=1.0),
    "sinks": RULES._replace(sinks=SINKS),
    "all of them": RULES._replace(window=20, chunk=48, soft_cap=5.0, sinks=SINKS),
}


@holds("Attention over the attached pages")
class AttentionTests(DeviceTests):
    """Tokens attend to what their rules let them see, whatever their order, their prompts and their pages."""

    @pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
    def test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position(self, chosen: list[list[int]]) -> None:
        self._check(chosen)

    @pytest.mark.parametrize("rules", OTHER_RULES.values(), ids=OTHER_RULES)
    def test_each_layer_has_its_rules(self, rules: AttentionRules) -> None:
        self._check([spread_out(50, 200), spread_out(7, 70)], rules)

    def test_pages_of_every_format(self) -> None:
        for format in self.formats:
            if format == "latent":
                self._check([spread_out(3, 70)], AttentionRules(16, 0.04, latent=512), layout=LATENT, format=format)
            else:
                self._check([spread_out(20, 150), spread_out(9, 90)], format=format, block_size=32)

    @pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
    def test_keys_and_values_of_8_bits_have_scales(self, dtype: str) -> None:
        if dtype in self.dtypes:
            layout = KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype, chunk_tokens=16)
            self._check([spread_out(20, 100)], RULES._replace(key_scale=0.5, value_scale=2.0), layout=layout)

    @holds("Raises Unsupported where several groups are attached")
    def test_attention_over_several_groups_is_refused(self, make_harness: MakeHarness) -> None:
        setup = self.setup(key_dim=64, value_dim=64)
        harness, other, rules = make_harness(setup), make_harness(setup), [AttentionRules(3, 0.2)] * 2
        if harness.device.attention(rules, torch.float32) is None:
            pytest.skip("the device has no attention")
        other.join(harness, 1)
        with pytest.raises(Unsupported):
            harness.device.attention(rules, torch.float32)

    def _check(
        self,
        chosen: list[list[int]],
        rules: AttentionRules = RULES,
        *,
        layout: KVLayout = LAYOUT,
        format: PageFormat | None = None,
        block_size: int = 16,
    ) -> None:
        device = self.create()
        try:
            case = AttentionCase(
                device, self.torch_type, chosen, rules,
                layout=layout, format=format or self.formats[0], block_size=block_size,
            )  # fmt: skip
            case.check()
        finally:
            device.close()
