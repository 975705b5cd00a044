"""Devices with one fault each in limits, steps and pinning, and the test that must catch it."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blendhub.contracts import (
    Segment,
    Transfer,
)
from blendhub.core.errors import InvalidInput
from blendhub.testing.device_reference import (
    CompletedTransfer,
    ReferenceDevice,
    rotated,
    torch_type,
)


class Overflows(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        after, float32_error = rotated(key, rotation, old, new)
        after[np.abs(after) > torch.finfo(torch_type(self._layout.dtype)).max] = np.nan
        return after, float32_error


class RecomputesNoTokens(ReferenceDevice):
    block_tokens = 0


class DropsThePendingTransfer(ReferenceDevice):
    """Copies when ``wait`` is called, and only for the transfer that was started last."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        load, device = super().load, self

        class Later(CompletedTransfer):
            def wait(self) -> None:
                if device._last is self:
                    load(segments, block_ids, skip_prefix_n_tokens)

        self._last = Later()
        return self._last


class SnapshotDevice(ReferenceDevice):
    """Keeps a copy of the pages as they were at ``begin_step``."""

    _snapshot: list[Any] | None = None

    def begin_step(self) -> None:
        self._snapshot = self._copied()

    def _copied(self) -> list[Any]:
        return [bits.copy() for tensors in self._bits for bits in tensors]

    def _write(self, arrays: list[Any], where: Any = None) -> None:
        pages = [bits for tensors in self._bits for bits in tensors]
        for number, (bits, array) in enumerate(zip(pages, arrays, strict=True)):
            np.copyto(bits, array, where=True if where is None else where[number])


class FollowsTheFirstStep(SnapshotDevice):
    """What the engine wrote after the first ``begin_step`` arrives after a load and overwrites it."""

    def begin_step(self) -> None:
        if self._snapshot is None:
            super().begin_step()

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        before = self._copied()
        done = super().load(segments, block_ids, skip_prefix_n_tokens)
        if self._snapshot is not None:
            self._write(before, [one != other for one, other in zip(before, self._snapshot, strict=True)])
        return done


class LoadsIntoThePagesOfTheStepsBegin(SnapshotDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        if self._snapshot is not None:
            self._write(self._snapshot)
        return super().load(segments, block_ids, skip_prefix_n_tokens)


class SavesThePagesOfTheStepsBegin(SnapshotDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        now = self._copied()
        if self._snapshot is not None:
            self._write(self._snapshot)
        done = super().save(segments, block_ids)
        self._write(now)
        return done


class PinsWhatIsNotReserved(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        arena[::4096].sum()


class PinsInTheCallersThread(ReferenceDevice):
    """Waits until the arena is reserved, but not for ever."""

    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        deadline = time.monotonic() + 2
        while progress is not None and progress().left and time.monotonic() < deadline:
            time.sleep(0.01)


class AsksForProgressForEver(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self._ends = threading.Event()
        if progress is not None:
            threading.Thread(target=self._ask, args=(progress,), daemon=True).start()

    def _ask(self, progress: Any) -> None:
        for _ in range(1000):
            if not self._ends.wait(0.01):
                progress()

    def close(self) -> None:
        self._ends.set()
        super().close()


class RefusesToCopyWhileItIsReserved(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self._progress = progress

    def _ready(self) -> Any:
        if self._progress is not None and self._progress().left:
            raise InvalidInput("the arena is still being reserved")
        return super()._ready()


FAULTS = [
    (DropsThePendingTransfer, "test_several_transfers_may_be_pending"),
    (Overflows, "test_values_too_large_for_8_bits_saturate"),
    (RecomputesNoTokens, "test_block_tokens_is_a_number_of_tokens"),
    (FollowsTheFirstStep, "test_a_load_overwrites_what_the_engine_wrote_before_the_step"),
    (LoadsIntoThePagesOfTheStepsBegin, "test_a_step_writes_other_pages_than_its_loads_and_its_saves_see_them"),
    (SavesThePagesOfTheStepsBegin, "test_a_step_writes_other_pages_than_its_loads_and_its_saves_see_them"),
    (PinsWhatIsNotReserved, "test_an_arena_is_used_while_it_is_being_reserved"),
    (PinsInTheCallersThread, "test_an_arena_is_used_while_it_is_being_reserved"),
    (AsksForProgressForEver, "test_an_arena_is_used_while_it_is_being_reserved"),
    (RefusesToCopyWhileItIsReserved, "test_an_arena_is_used_while_it_is_being_reserved"),
]
