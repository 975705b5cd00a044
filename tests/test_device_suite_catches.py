"""Devices with one fault for each paragraph of the contract, and the test of the device suite that must see it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from msgspec.structs import replace

from blendhub.contracts import AttentionRules, ChosenAttention, PageSegment, Transfer
from blendhub.core.errors import InvalidInput
from blendhub.testing import AttentionTests, DeviceSuite
from blendhub.testing.attention_reference import ReferenceAttention
from tests.suite_runs import proofs

pytestmark = pytest.mark.slow


class Sound(CpuDevice):
    """The CPU device, and attention by the reference: without a fault."""

    attends: Any = ReferenceAttention

    def __init__(self) -> None:
        super().__init__(CpuOptions())
        self.attached: list[Any] = []

    def _attach(self, layers: Any, block_size: int, layout: Any) -> None:
        super()._attach(layers, block_size, layout)
        self.attached.append((layers, block_size, layout))

    def _close(self) -> None:
        super()._close()
        self.attached = []

    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype, group: int = 0) -> ChosenAttention:
        if group not in range(len(self.attached)):
            raise InvalidInput(f"there is no group {group}")
        attention: ChosenAttention = self.attends(*self.attached[group], rules)
        return attention

    @property
    def pages(self) -> list[torch.Tensor]:
        return [tensor for layers, *_ in self.attached for layer in layers for tensor in layer.tensors]


class CopiedLater(Transfer):
    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy = copy

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self._copy()


Faulty = type[Sound]


def device(**methods: Any) -> Faulty:
    return type("Faulty", (Sound,), methods)


def attaching(change: Callable[[Any], Any]) -> Faulty:
    """A device that takes each layer for another one."""
    return device(_attach=lambda self, layers, *sizes: Sound._attach(self, [*map(change, layers)], *sizes))


def rotating(**how: Any) -> Faulty:
    return attaching(lambda layer: replace(layer, rotation=layer.rotation and replace(layer.rotation, **how)))


def attending(**methods: Any) -> Faulty:
    return device(attends=type("Faulty", (ReferenceAttention,), methods))


def ignoring(**rules: Any) -> Faulty:
    """A device that takes these rules for those of all layers."""

    def attend(self: Any, layer: int, queries: Any, output: Any) -> None:
        self._rules = [one._replace(**rules) for one in self._rules]
        ReferenceAttention.attend(self, layer, queries, output)

    return attending(attend=attend)


def as_if_contiguous(tensor: Any) -> Any:
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def from_the_first_row(segment: Any) -> Any:
    return replace(segment, row=0) if isinstance(segment, PageSegment) else segment


class DecodesAllPages(Sound):
    """Which changes the bits of some NaNs."""

    def _load(self, *arguments: Any) -> Transfer:
        transfer = super()._load(*arguments)
        for pages in self.pages:
            pages.copy_(pages.double().to(pages.dtype))
        return transfer


class ChecksNothing(Sound):
    """Raises IndexError and the like, or copies."""

    def attach(self, layers: Any, block_size: int, layout: Any) -> None:
        self._attach(layers, block_size, layout)

    def pin(self, arena: Any, progress: Any = None) -> None:
        self._pin(arena, progress)

    def load(self, segments: Any, block_ids: Any, skip_prefix_n_tokens: int = 0, group: int = 0) -> Transfer:
        return self._load(segments, block_ids, group)

    def save(self, segments: Any, block_ids: Any, group: int = 0) -> Transfer:
        return self._save(segments, block_ids, group)


CopiesOnlyInWait = device(_load=lambda self, *given: CopiedLater(lambda: Sound._load(self, *given)))


class PinsInTheCallersMode(Sound):
    """The tensor of the arena is made, and written, as torch allows in the caller's mode."""

    tensor: Any

    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self.tensor = torch.from_numpy(arena).view(torch.uint8)

    def _save(self, *arguments: Any) -> Transfer:
        self.tensor[:0] = self.tensor[:0]
        return super()._save(*arguments)


class KnowsTheLastGroupOnly(Sound):
    def _attach(self, *layers: Any) -> None:
        super()._attach(*layers)
        self._groups = self._groups[-1:] * len(self._groups)


ATTEND: Any = ReferenceAttention.attend
BEGIN: Any = ReferenceAttention.begin
PROBE: Any = ReferenceAttention.probe


FAULTS: dict[str, list[Faulty]] = {
    "test_any_transfers": [
        device(_attach=lambda self, layers, *sizes: Sound._attach(self, layers[::-1], *sizes)),
        rotating(offset=0),
        rotating(neox=True),
    ],
    "test_chunks_and_blocks_of_any_size": [
        device(load=lambda self, segments, blocks, _=0, **of: Sound.load(self, segments, blocks, **of)),
    ],
    "test_blocks_are_copied_to_other_blocks_from_and_to_any_token": [
        device(_load=lambda self, segments, *of: Sound._load(self, [*map(from_the_first_row, segments)], *of)),
    ],
    "test_invalid_sources_change_nothing": [ChecksNothing],
    "test_groups_of_layers_have_pages_and_block_tables_of_their_own": [KnowsTheLastGroupOnly],
    "test_every_bit_is_copied_and_moved_keys_are_rotated": [DecodesAllPages],
    "test_invalid_segments_change_nothing": [ChecksNothing],
    "test_several_transfers_may_be_pending": [CopiesOnlyInWait],
    "test_calls_inside_and_outside_of_inference_mode": [PinsInTheCallersMode],
    "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position": [
        attending(begin=lambda self, of: BEGIN(self, of._replace(positions=of.positions + 1))),
        attending(begin=lambda self, of: BEGIN(self, of._replace(prompts=0 * of.prompts))),
        attending(attend=lambda *of: ATTEND(*of[:2], as_if_contiguous(of[2]), of[3])),
    ],
    "test_each_layer_has_its_rules": [
        attending(attend=lambda self, layer, *of: ATTEND(self, 0, *of)),
        *(ignoring(**rule) for rule in ({"window": None}, {"chunk": None}, {"sinks": None}, {"soft_cap": 0.0})),
    ],
    "test_keys_that_are_not_readable_are_left_out": [
        attending(begin=lambda self, of: BEGIN(self, of._replace(readable=of.readable is not None and ~of.readable))),
        attending(probe=lambda self, layer, query, keys, *of: PROBE(self, layer, query, 0 * keys, *of)),
        attending(probe=lambda self, *of: PROBE(self, *of[:-1])),
    ],
    "test_pages_of_every_format": [ignoring(latent=0)],
    "test_keys_and_values_of_8_bits_have_scales": [ignoring(key_scale=1.0), ignoring(value_scale=1.0)],
}


class TestSound(AttentionTests):
    """Without a fault there is nothing to catch. The rest of the suite, plugins/cpu tests."""

    create: Any = Sound


globals().update(proofs(type("Suite", (DeviceSuite, TestSound), {"__module__": __name__}), FAULTS))
