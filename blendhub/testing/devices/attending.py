"""Attention for chosen tokens, held against plain torch: for devices that have it."""

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens, Device, PagedLayer, PageFormat
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import KVLayout
from blendhub.devices import torch_type
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.testing.device_reference import page_shapes
from blendhub.testing.devices.base import DeviceTests
from blendhub.testing.devices.device_harness import DeviceHarness
from blendhub.testing.sentences import holds

RULES = AttentionRules(heads=4, scale=0.2)
LAYOUT = KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype="float32", chunk_tokens=16)
LATENT = KVLayout(layers=1, kv_heads=1, key_dim=576, value_dim=0, dtype="float32", chunk_tokens=16)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def spread_out(n: int, end: int, seed: int = 1) -> list[int]:
    """So many different positions before ``end``, in any order."""
    positions: list[int] = np.random.default_rng(seed).choice(end, n, replace=False).tolist()
    return positions


class AttentionPages(NamedTuple):
    """What the pages of a case of attention are like."""

    layout: KVLayout = LAYOUT
    format: PageFormat = "packed_heads"
    block_size: int = 16


PAGES = AttentionPages()


class AttendedGroup:
    """Two layers with random keys and values, in pages of any order, to which tokens of several prompts attend.

    ``n_readable``: tokens probe, and of the other tokens' first so many keys two of three are readable; 0: they do not.
    The second layer has twice the scale. Queries, keys and answers are parts of wider tensors, as engines have them.
    """

    def __init__(
        self,
        place: str,
        chosen: Sequence[Sequence[int]],
        rules: AttentionRules,
        pages: AttentionPages,
        dtype: torch.dtype,
        seed: int = 3,
        n_readable: int = 0,
    ) -> None:
        random, (layout, format, block_size) = torch.Generator().manual_seed(seed), pages
        self.layout, self.block_size, self.dtype = msgspec.structs.replace(layout, layers=2), block_size, dtype
        needed = -(-(n_readable or max(max(positions) + 1 for positions in chosen)) // block_size)
        n_blocks = len(chosen) * needed + 3
        *used, freed = torch.randperm(n_blocks, generator=random)[2:].tolist()
        blocks = np.array(used, np.int32).reshape(len(chosen), needed)

        def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return (torch.randn(shape, generator=random) / 2).to(dtype).to(place)

        shapes, kind = page_shapes(format, n_blocks, block_size, self.layout), torch_type(layout.dtype)
        self.layers = [
            PagedLayer("layer", format, tuple(numbers(*shape, dtype=kind) for shape in shapes)) for _ in range(2)
        ]
        prompts = np.repeat(np.arange(len(chosen)), [len(positions) for positions in chosen])
        any_order = np.random.default_rng(4).permutation(len(prompts))
        readable = np.random.default_rng(5).random((len(chosen), n_readable)) < 2 / 3 if n_readable else None
        for row, positions in zip([] if readable is None else readable, chosen, strict=readable is not None):
            row[[at for at in positions if at < n_readable]] = False
        self.tokens = ChosenTokens(np.concatenate(chosen)[any_order], prompts[any_order], blocks, readable)
        kept = blocks.copy()
        for row, positions in zip(kept, chosen, strict=True):
            row[: max(0, min(positions) + 1 - (rules.window or min(positions) + 1)) // block_size] = freed
        self.of_engine = self.tokens._replace(blocks=kept)
        """What the engine gives: blocks that have left the windows of all tokens are another block here."""
        if rules.sinks is not None:
            rules = rules._replace(sinks=rules.sinks.to(place))
        self.rules = [rules, rules._replace(scale=2 * rules.scale)]
        self._queries = numbers(len(prompts), rules.heads, 2 * layout.key_dim, dtype=dtype)[..., : layout.key_dim]
        self._value_width = rules.latent or layout.value_dim
        keys = numbers(len(prompts), layout.kv_heads, 2 * layout.key_dim, dtype=dtype)
        values = keys if rules.latent else numbers(len(prompts), layout.kv_heads, 2 * layout.value_dim, dtype=dtype)
        self._own = keys[..., : layout.key_dim], values[..., : self._value_width]

    def attach(self, device: Device) -> None:
        device.attach(self.layers, self.block_size, self.layout)

    def check(self, attention: ChosenAttention) -> None:
        """Compare the answers of both layers, after ``begin``, with the reference's."""
        reference = ReferenceAttention(self.layers, self.block_size, self.layout, self.rules)
        reference.begin(self.tokens)
        for actual, expected in zip(self._answers(attention), self._answers(reference), strict=True):
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE[self.dtype], atol=TOLERANCE[self.dtype])

    def _answers(self, attention: ChosenAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens take, and of a probe what each key receives in both layers together."""
        shape = len(self.layers), *self._queries.shape[:2], 2 * self._value_width
        output, readable = self._queries.new_full(shape, torch.nan), self.tokens.readable
        received = output.new_zeros((0, 0) if readable is None else readable.shape, dtype=torch.float32)
        for layer in range(len(self.layers)):
            taken = output[layer, ..., : self._value_width]
            if readable is None:
                attention.attend(layer, self._queries, taken)
            else:
                attention.probe(layer, self._queries, *self._own, taken, received)
        assert output[..., self._value_width :].isnan().all(), "bytes behind the answers were written"
        return output[..., : self._value_width].float(), received


def check_attention(
    device: Device,
    place: str,
    chosen: Sequence[Sequence[int]],
    rules: AttentionRules = RULES,
    pages: AttentionPages = PAGES,
    dtype: torch.dtype = torch.float32,
    n_readable: int = 0,
) -> None:
    """Compare what tokens of several prompts take from the keys and values of a group in the second of two forwards."""
    check_groups(device, [AttendedGroup(place, chosen, rules, pages, dtype, n_readable=n_readable)])


def check_groups(device: Device, groups: Sequence[AttendedGroup]) -> None:
    """Compare what tokens take in each group of a model's layers, all of which begin a forward before one attends."""
    for group in groups:
        group.attach(device)
    attentions = [device.attention(group.rules, group.dtype, number) for number, group in enumerate(groups)]
    for group, attention in zip(groups, attentions, strict=True):
        assert attention, "the device has no attention"
        tokens, blocks = group.of_engine, group.of_engine.blocks[::-1].copy()
        attention.begin(ChosenTokens(tokens.positions[:1], tokens.prompts[:1], blocks))
        attention.begin(tokens)
    for group, attention in zip(groups, attentions, strict=True):
        assert attention
        group.check(attention)


CHOSEN = [
    [spread_out(70, 200)],
    [[at for start in range(3, 190, 13) for at in range(start, start + 4)]],
    [list(range(150))],
    [[0, 199]],
    [spread_out(5, 180), [0], spread_out(40, 60, 2), list(range(100, 120))],
]
"""Single tokens, spans of four, one span of all, the first token and the last, and several prompts."""
SINKS = torch.tensor([0.5, -1.0, 2.0, 9.0])
OTHER_RULES = [
    RULES._replace(heads=2),
    RULES._replace(window=37),
    RULES._replace(window=1),
    RULES._replace(chunk=48),
    RULES._replace(soft_cap=2.0, scale=1.0),
    RULES._replace(sinks=SINKS),
    RULES._replace(window=20, chunk=48, soft_cap=5.0, sinks=SINKS),
]


@holds("Attention over the pages of a group")
class AttentionTests(DeviceTests):
    """Tokens attend to what their rules let them see, whatever their order, their prompts and their pages."""

    def test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position(self) -> None:
        for chosen in CHOSEN:
            self._check(chosen)

    def test_each_layer_has_its_rules(self) -> None:
        for rules in OTHER_RULES:
            self._check([spread_out(50, 200), spread_out(7, 70)], rules)

    def test_pages_of_every_format(self) -> None:
        for format in self.formats:
            if format == "latent":
                latent = AttentionRules(16, 0.04, latent=512)
                self._check([spread_out(3, 70)], latent, AttentionPages(LATENT, format))
            else:
                self._check([spread_out(20, 150), spread_out(9, 90)], RULES, AttentionPages(LAYOUT, format, 32))

    def test_keys_and_values_of_8_bits_have_scales(self) -> None:
        for dtype in {"float8_e4m3", "float8_e5m2"} & set(self.dtypes):
            pages = AttentionPages(msgspec.structs.replace(LAYOUT, dtype=dtype), self.formats[0])
            self._check([spread_out(20, 100)], RULES._replace(key_scale=0.5, value_scale=2.0), pages)

    @holds("A probe attends to readable keys and to its tokens' own")
    def test_keys_that_are_not_readable_are_left_out(self) -> None:
        """Some tokens see none of the 90 keys that may be readable, and some stand behind all of these."""
        for rules in (RULES, *OTHER_RULES):
            self._check([spread_out(9, 150), [0, 1, 130]], rules, n_readable=90)
        if "latent" in self.formats:
            latent = AttentionRules(16, 0.04, latent=512)
            self._check([spread_out(3, 70)], latent, AttentionPages(LATENT, "latent"), n_readable=60)
        for dtype in {"float8_e4m3"} & set(self.dtypes):
            pages = AttentionPages(msgspec.structs.replace(LAYOUT, dtype=dtype), self.formats[0])
            self._check([spread_out(20, 100)], RULES._replace(key_scale=0.5, value_scale=2.0), pages, n_readable=90)

    def test_groups_of_layers_have_pages_rules_and_block_tables_of_their_own(self) -> None:
        """Models have several if some layers have windows, and the engine has freed what has left these."""
        chosen = [[at + 90 for at in spread_out(40, 110)], spread_out(9, 80)]
        narrow = AttentionPages(msgspec.structs.replace(LAYOUT, kv_heads=1, key_dim=32, value_dim=32), block_size=8)
        kinds = ((PAGES, RULES), (narrow, RULES._replace(window=37)), (PAGES, RULES._replace(chunk=48)))
        groups = [
            AttendedGroup(self.torch_type, chosen, rules, pages._replace(format=self.formats[0]), torch.float32, seed)
            for seed, (pages, rules) in enumerate(kinds)
        ]
        with closing(self.create()) as device:
            check_groups(device, groups)

    @holds("InvalidInput for a group that is not attached")
    def test_a_group_that_is_not_attached_has_no_attention(self, harness: DeviceHarness) -> None:
        for number in (1, -1):
            with pytest.raises(InvalidInput):
                harness.device.attention([AttentionRules(3, 0.2)] * 2, torch.float32, number)

    def _check(
        self,
        chosen: list[list[int]],
        rules: AttentionRules = RULES,
        pages: AttentionPages | None = None,
        n_readable: int = 0,
    ) -> None:
        pages = pages or PAGES._replace(format=self.formats[0])
        with closing(self.create()) as device:
            check_attention(device, self.torch_type, chosen, rules, pages, n_readable=n_readable)
