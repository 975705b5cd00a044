"""A correct device, slow and simple, and what is wrong with devices that are made of it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from blendhub import Span
from blendhub.contracts import AttentionRules, ChosenAttention, Device, Segment, Transfer
from blendhub.core.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.devices import torch_type
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.testing.device_reference import ReferenceDevice, decoded, encoded, rotated

replace = msgspec.structs.replace


class Copy(Transfer):
    """A copy that is made at once or, if ``later`` is given, when something waits for it."""

    def __init__(self, later: Callable[[], object] = lambda: None) -> None:
        self._later = later

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self._later()


class SlowDevice(Device):
    """A correct device with attention."""

    block_tokens = 16
    reference: Any = ReferenceDevice
    attends: Any = ReferenceAttention

    def __init__(self) -> None:
        self.groups: list[ReferenceDevice] = []
        self.arena: Any = None

    def _attach(self, layers: Any, block_size: int, layout: Any) -> None:
        self.groups.append(self.reference(layers, block_size, layout))

    def _pin(self, arena: Any, progress: Any) -> None:
        self.arena = arena

    def _load(self, segments: Sequence[Segment], block_ids: Any, group: int) -> Transfer:
        self.groups[group].arena = self.arena
        self.groups[group].load(segments, block_ids)
        return Copy()

    def _save(self, segments: Sequence[Segment], block_ids: Any, group: int) -> Transfer:
        self.groups[group].arena = self.arena
        self.groups[group].save(segments, block_ids)
        return Copy()

    def _close(self) -> None:
        self.groups, self.arena = [], None

    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype) -> ChosenAttention:
        if len(self.groups) > 1:
            raise Unsupported("there are several groups")
        (group,) = self.groups
        attention: ChosenAttention = self.attends(group.layers, group.block_size, group.layout, rules)
        return attention

    @property
    def pages(self) -> list[Any]:
        return [bits for group in self.groups for tensors in group.bits for bits in tensors]


Faulty = type[SlowDevice]


def device(**methods: Any) -> Faulty:
    return type("FaultyDevice", (SlowDevice,), methods)


def loading(change: Callable[[Any, Sequence[Segment], int], tuple[Sequence[Segment], int]]) -> Faulty:
    """A device that loads other segments, or skips another prefix, than it is told."""

    def load(self: Any, segments: Any, block_ids: Any, skip_prefix_n_tokens: int = 0, group: int = 0) -> Transfer:
        changed, skipped = change(self, segments, skip_prefix_n_tokens)
        return SlowDevice.load(self, changed, block_ids, skipped, group)

    return device(load=load)


def saving(change: Callable[[Any, Sequence[Segment]], Sequence[Segment]]) -> Faulty:
    """A device that saves other segments than it is told."""

    def save(self: Any, segments: Any, block_ids: Any, group: int = 0) -> Transfer:
        return SlowDevice.save(self, change(self, segments), block_ids, group)

    return device(save=save)


def rotating(change: Callable[[Any, Any, Any, int, int], Any]) -> Faulty:
    """A device that rotates a key ``(reference, key, rotation, old, new)`` in another way."""
    return device(reference=type("Rotating", (ReferenceDevice,), {"rotated": change}))


def attaching(change: Callable[[Any], Any]) -> Faulty:
    """A device that takes each layer for another one."""

    def attach(self: Any, layers: Any, block_size: int, layout: Any) -> None:
        SlowDevice._attach(self, [change(layer) for layer in layers], block_size, layout)

    return device(_attach=attach)


def attending(**methods: Any) -> Faulty:
    return device(attends=type("Attending", (ReferenceAttention,), methods))


def beginning(change: Callable[[Any], dict[str, Any]]) -> Faulty:
    """A device whose forwards are over other tokens."""
    return attending(begin=lambda self, tokens: ReferenceAttention.begin(self, tokens._replace(**change(tokens))))


def ignoring(**rules: Any) -> Faulty:
    """A device that takes these rules for those of all layers."""

    def attend(self: Any, layer: int, queries: Any, output: Any) -> None:
        self._rules = [one._replace(**rules) for one in self._rules]
        ReferenceAttention.attend(self, layer, queries, output)

    return attending(attend=attend)


def as_if_contiguous(tensor: Any) -> Any:
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def whole_chunks(self: Any, segments: Sequence[Segment], skipped: int) -> Any:
    """Extend every segment to the end of its shard, if no other begins before that."""
    starts = [segment.span.start for segment in segments]
    longer = []
    for segment in segments:
        start = segment.span.start
        end = start + self.groups[0].layout.chunk_tokens - segment.row
        longer.append(replace(segment, span=Span(start, min([end, *(one for one in starts if one > start)]))))
    return longer, skipped


def decodes_all_pages(self: Any, *arguments: Any, **group: Any) -> Transfer:
    """Decoding and encoding changes the bits of some NaNs."""
    transfer = SlowDevice.load(self, *arguments, **group)
    for reference in self.groups:
        for bits in self.pages:
            bits[...] = encoded(decoded(bits, reference.layout.dtype), reference.layout.dtype)
    return transfer


def scaled_twice(self: Any, key: Any, rotation: Any, old: int, new: int) -> Any:
    """Applies the new row's scale to keys that the old row has scaled already."""
    after, float32_error = rotated(key, rotation, old, new)
    after[float32_error > 0] *= np.hypot(*rotation.cos_sin[new].double().numpy().reshape(2, -1)[:, 0])
    return after, float32_error


def rounded_twice(self: Any, key: Any, rotation: Any, old: int, new: int) -> Any:
    once = encoded(rotated(key, rotation, old, 0)[0], self.layout.dtype)
    return rotated(decoded(once, self.layout.dtype), rotation, 0, new)


def overflowing(self: Any, key: Any, rotation: Any, old: int, new: int) -> Any:
    after, float32_error = rotated(key, rotation, old, new)
    after[np.abs(after) > torch.finfo(torch_type(self.layout.dtype)).max] = np.nan
    return after, float32_error


def refuse_bytes(layer: Any) -> Any:
    if layer.tensors[0].dtype == torch.uint8:
        raise LayoutMismatch("these are bytes")
    return layer


def attach_alike(self: Any, layers: Any, block_size: int, layout: Any) -> None:
    alike = [replace(layer, rotation=layers[0].rotation) for layer in layers]
    SlowDevice._attach(self, alike, block_size, layout)


def checks_the_whole_table(self: Any, segments: Any, block_ids: Any, *more: Any, **group: Any) -> Transfer:
    if not all(0 <= block < len(self.pages[0]) for block in block_ids):
        raise InvalidInput("there is no such block")
    return SlowDevice.load(self, segments, block_ids, *more, **group)


def copies_before_it_checks(self: Any, segments: Any, block_ids: Any, skipped: int = 0, group: int = 0) -> Transfer:
    for segment in segments:
        SlowDevice.load(self, [segment], block_ids, skipped, group)
    return Copy()


def copies_only_in_wait(self: Any, *arguments: Any, **group: Any) -> Transfer:
    return Copy(lambda: SlowDevice.load(self, *arguments, **group))


def copies_the_last_only(self: Any, *arguments: Any, **group: Any) -> Transfer:
    """When something waits for the transfer that was started last."""
    self.last = transfer = Copy(lambda: self.last is transfer and SlowDevice.load(self, *arguments, **group))
    return transfer


def refuses_nothing(self: Any, segments: Any, *more: Any, **group: Any) -> Transfer:
    if not segments:
        raise InvalidInput("nothing is to be loaded")
    return SlowDevice.load(self, segments, *more, **group)


def saves_through_that_tensor(self: Any, *arguments: Any, **group: Any) -> Transfer:
    self.tensor[:0] = self.tensor[:0]
    return SlowDevice.save(self, *arguments, **group)


def pins_a_tensor_in_the_caller_s_mode(self: Any, arena: Any, progress: Any = None) -> None:
    SlowDevice.pin(self, arena)
    self.tensor = torch.from_numpy(arena).view(torch.uint8)


def keeps_the_first_arena(self: Any, arena: Any, progress: Any) -> None:
    self.arena = arena if self.arena is None else self.arena


def touches_all_of_the_arena(self: Any, arena: Any, progress: Any) -> None:
    self.arena = arena
    arena[::4096].sum()


def attends_to_the_first_group(self: Any, *arguments: Any) -> Any:
    self.groups = self.groups[:1]
    return SlowDevice.attention(self, *arguments)


def copied(layer: Any) -> Any:
    return replace(layer, tensors=tuple(tensor.contiguous() for tensor in layer.tensors))


def with_table_as_if_contiguous(layer: Any) -> Any:
    return replace(layer, rotation=replace(layer.rotation, cos_sin=as_if_contiguous(layer.rotation.cos_sin)))


def source_of(segment: Segment) -> Span:
    return Span(segment.source_start, segment.source_start + len(segment.span))


def from_the_prefix(segment: Segment, skipped: int) -> Segment:
    """Its first token that is left is taken for its first one."""
    n_skipped = max(0, skipped - segment.span.start)
    return replace(segment, source_start=max(segment.source_start - n_skipped, 0))


def moved_like(first: Segment, segment: Segment) -> Segment:
    return replace(segment, source_start=segment.span.start + first.source_start - first.span.start)


class ThreeHeads(ReferenceDevice):
    """A device that knows three heads."""

    def _place(self, index: int, arrays: Any, place: tuple[int, int, int]) -> Any:
        block, slot, head = place
        return super()._place(index, arrays, (block, slot, min(head, 2)))


class ChecksNothing(SlowDevice):
    """Raises KeyError and the like, or copies."""

    def attach(self, layers: Any, block_size: int, layout: Any) -> None:
        self._attach(layers, block_size, layout)

    def pin(self, arena: Any, progress: Any = None) -> None:
        self._pin(arena, progress)

    def load(self, segments: Any, block_ids: Any, skip_prefix_n_tokens: int = 0, group: int = 0) -> Transfer:
        return self._load(segments, block_ids, group)

    def save(self, segments: Any, block_ids: Any, group: int = 0) -> Transfer:
        return self._save(segments, block_ids, group)


class KnowsTheLastGroupOnly(SlowDevice):
    def _attach(self, layers: Any, block_size: int, layout: Any) -> None:
        self.groups = [ReferenceDevice(layers, block_size, layout)] * (len(self.groups) + 1)


class StepDevice(SlowDevice):
    """Keeps a copy of the pages as they were at ``begin_step``."""

    before_the_step: list[Any] | None = None

    def begin_step(self) -> None:
        self.before_the_step = [bits.copy() for bits in self.pages]

    def write(self, arrays: Any) -> None:
        for bits, array in zip(self.pages, arrays or [], strict=bool(arrays)):
            bits[...] = array


class LoadsBeforeWhatTheEngineWroteLast(StepDevice):
    """What the engine wrote after the first ``begin_step`` arrives after a load and overwrites it."""

    def begin_step(self) -> None:
        if self.before_the_step is None:
            super().begin_step()

    def _load(self, segments: Any, block_ids: Any, group: int) -> Transfer:
        written = [bits.copy() for bits in self.pages]
        super()._load(segments, block_ids, group)
        for bits, late, old in zip(self.pages, written, self.before_the_step or [], strict=False):
            np.copyto(bits, late, where=late != old)
        return Copy()


class LoadsIntoThePagesBeforeTheStep(StepDevice):
    def _load(self, segments: Any, block_ids: Any, group: int) -> Transfer:
        self.write(self.before_the_step)
        return super()._load(segments, block_ids, group)


class SavesThePagesBeforeTheStep(StepDevice):
    def _save(self, segments: Any, block_ids: Any, group: int) -> Transfer:
        now = [bits.copy() for bits in self.pages]
        self.write(self.before_the_step)
        super()._save(segments, block_ids, group)
        self.write(now)
        return Copy()


class SavesEachSegmentOnce(SlowDevice):
    saved: tuple[Segment, ...] = ()

    def _save(self, segments: Any, block_ids: Any, group: int) -> Transfer:
        fresh = [segment for segment in segments if segment not in self.saved]
        self.saved += tuple(fresh)
        return super()._save(fresh, block_ids, group)


class WaitsUntilTheArenaIsReserved(SlowDevice):
    """But not for ever."""

    def _pin(self, arena: Any, progress: Any) -> None:
        super()._pin(arena, progress)
        deadline = time.monotonic() + 2
        while progress is not None and progress().left and time.monotonic() < deadline:
            time.sleep(0.01)


class AsksForProgressForEver(SlowDevice):
    def _pin(self, arena: Any, progress: Any) -> None:
        super()._pin(arena, progress)
        self.ends = threading.Event()
        if progress is not None:
            threading.Thread(target=self._ask, args=(progress,), daemon=True).start()

    def _ask(self, progress: Any) -> None:
        while not self.ends.wait(0.01):
            progress()

    def _close(self) -> None:
        self.ends.set()
        super()._close()


class SharesKeysInTurn(ReferenceAttention):
    """A head of keys serves every n-th head of queries instead of neighbours."""

    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        heads = torch.arange(queries.shape[1]).view(-1, self._planes[layer][0].shape[1]).T.flatten()
        answers = torch.empty_like(output)
        super().attend(layer, queries[:, heads], answers)
        output[:, heads] = answers
