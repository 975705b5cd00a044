"""Loads and saves of all groups of layers, and of states: each is a transfer of the device for every group."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.contracts import Device, Segment, Transfer
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import section_starts, shard_bytes_of
from blendhub.core.spans import Span
from blendhub.vllm.messages import NULL_BLOCK
from blendhub.vllm.model.chosen import Blocks
from blendhub.vllm.model.layer_groups import LayerGroup
from blendhub.vllm.model.states import StateGroup


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
    def __init__(self, device: Device, groups: Sequence[LayerGroup], states: Sequence[StateGroup] = ()) -> None:
        """``states``: the groups of recurrent layers, which are attached behind the others."""
        self.device = device
        self.shard_bytes = max(shard_bytes_of([one.layout for one in some]) for some in (groups, states) if some)
        """The most bytes of a shard: of KV, or of a state."""
        self._groups = list(zip(groups, section_starts([group.layout for group in groups]), strict=True))
        self._states = list(zip(states, section_starts([group.layout for group in states]), strict=True))

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

    def load_state(self, shard: int, n_tokens: int, tables: Sequence[Blocks]) -> Transfer:
        """Load the state behind so many tokens to the block that vLLM has allocated for it."""
        return self._each_state(
            shard, n_tokens, tables, lambda *given: self.device.load(given[0], given[1], 0, given[2])
        )

    def save_state(self, shard: int, n_tokens: int, tables: Sequence[Blocks]) -> Transfer:
        """Save the state behind so many tokens, which vLLM keeps."""
        return self._each_state(shard, n_tokens, tables, self.device.save)

    def _each_state(
        self,
        shard: int,
        n_tokens: int,
        tables: Sequence[Blocks],
        copy: Callable[[Sequence[Segment], Blocks, int], Transfer],
    ) -> Transfer:
        begun: list[Transfer] = []
        try:
            for number, (group, start) in enumerate(self._states, len(self._groups)):
                at, rows = state_block(n_tokens, group.block_size), group.layout.chunk_tokens
                blocks = tables[group.table]
                if at >= len(blocks) or blocks[at] == NULL_BLOCK:
                    raise InvalidInput(f"vLLM has no block for the state behind {n_tokens} tokens")
                begun.append(
                    copy([Segment(Span(at * rows, (at + 1) * rows), shard + start, 0, at * rows)], blocks, number)
                )
        except BaseException:
            Transfers(begun).wait()
            raise
        return Transfers(begun)

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


def state_block(n_tokens: int, block_size: int) -> int:
    """Which of a request's blocks holds the state behind so many tokens."""
    return (n_tokens - 1) // block_size


def first_kept(blocks: npt.NDArray[np.int64]) -> int:
    """The number of the first block that vLLM has allocated, and has not freed."""
    kept = np.flatnonzero(blocks != NULL_BLOCK)
    return int(kept[0]) if len(kept) else len(blocks)
