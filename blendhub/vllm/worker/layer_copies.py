"""Loads and saves of all groups of layers: each is a transfer of the device for every group."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.contracts import Device, Segment, Transfer
from blendhub.core.layout import section_starts, shard_bytes_of
from blendhub.vllm.messages import NULL_BLOCK
from blendhub.vllm.model.chosen import Blocks
from blendhub.vllm.model.layer_groups import LayerGroup


class Transfers(Transfer):
    """Transfers that end together."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        errors: list[Exception] = []
        for part in self._parts:
            try:
                part.wait()
            except Exception as error:  # the others still copy
                errors.append(error)
        if errors:
            raise errors[0]


class LayerCopies:
    def __init__(self, device: Device, groups: Sequence[LayerGroup]) -> None:
        self.device = device
        self.shard_bytes = shard_bytes_of([group.layout for group in groups])
        self._groups = list(zip(groups, section_starts([group.layout for group in groups]), strict=True))

    def load(self, segments: Sequence[Segment], tables: Sequence[Blocks], skip_prefix: int) -> Transfer:
        """Load tokens of shards to a request's blocks: of each group those for which vLLM has allocated blocks."""

        def begin(number: int, group: LayerGroup, moved: Sequence[Segment], blocks: Blocks) -> Transfer:
            skipped = max(skip_prefix, first_kept(blocks) * group.block_size)
            return self.device.load(moved, group.pages(blocks), skipped, number)

        return self._each(segments, tables, begin)

    def save(self, segments: Sequence[Segment], tables: Sequence[Blocks]) -> Transfer:
        """Save tokens from a request's blocks to shards."""

        def begin(number: int, group: LayerGroup, moved: Sequence[Segment], blocks: Blocks) -> Transfer:
            return self.device.save(moved, group.pages(blocks), number)

        return self._each(segments, tables, begin)

    def _each(
        self,
        segments: Sequence[Segment],
        tables: Sequence[Blocks],
        begin: Callable[[int, LayerGroup, Sequence[Segment], Blocks], Transfer],
    ) -> Transfer:
        begun: list[Transfer] = []
        try:
            for number, (group, start) in enumerate(self._groups):
                moved = [replace(one, shard=one.shard + start) for one in segments] if start else segments
                begun.append(begin(number, group, moved, tables[group.table]))
        except BaseException:
            Transfers(begun).wait()
            raise
        return begun[0] if len(begun) == 1 else Transfers(begun)


def first_kept(blocks: npt.NDArray[np.int64]) -> int:
    """The number of the first block that vLLM has allocated, and has not freed."""
    kept = np.flatnonzero(blocks != NULL_BLOCK)
    return int(kept[0]) if len(kept) else len(blocks)
