"""Loads and saves of all groups of layers, and of states: each is a transfer of the device for every group."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.contracts import Device, PageSegment, Segment, Transfer
from blendhub.core.spans import Span
from blendhub.vllm.decision import without
from blendhub.vllm.messages import NULL_BLOCK
from blendhub.vllm.model.layer_groups import LayerGroup, StateGroup
from blendhub.vllm.model.recompute_set import Blocks


class Transfers(Transfer):
    """Transfers that end together."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        self._of_all(lambda part: part.wait())

    def release_pages(self) -> None:
        self._of_all(lambda part: part.release_pages())

    def _of_all(self, call: Callable[[Transfer], None]) -> None:
        errors: list[Exception] = []
        for part in self._parts:
            try:
                call(part)
            except Exception as error:  # the others still copy
                errors.append(error)
        if errors:
            raise errors[0]


class Load(NamedTuple):
    all: Transfer
    probed: Transfer
    """The layers that probes may read."""


class LayerCopies:
    def __init__(self, device: Device, groups: Sequence[LayerGroup], states: Sequence[StateGroup] = ()) -> None:
        """``states``: the groups of recurrent layers, which are attached behind the others."""
        self._device = device
        self.overlaps_compute = device.overlaps_compute
        self._groups = groups
        self._states = states

    def load(
        self,
        segments: Sequence[Segment],
        tables: Sequence[Blocks],
        skip_prefix: int,
        state_at: int | None = None,
        donors: Sequence[Sequence[PageSegment]] = (),
    ) -> Load:
        """Load tokens of shards to a request's blocks: of each group those for which vLLM has allocated blocks; and
        the state at ``state_at`` of the arena. ``donors``: for each table, what other blocks of it have instead."""
        with self._all_groups() as begun:
            for number, group in enumerate(self._groups):
                blocks = tables[group.table]
                skipped = max(skip_prefix, first_kept(blocks) * group.block_size)
                sources = _sources(segments, donors[group.table] if donors else (), group)
                begun.append(self._device.load(sources, group.pages(blocks), skipped, number))
            if state_at is not None:
                begun += self._of_states(state_at, tables, self._device.load)
        probed = [transfer for transfer, group in zip(begun, self._groups, strict=False) if group.is_probed]
        return Load(Transfers(begun), Transfers(probed))

    def save(self, segments: Sequence[Segment], tables: Sequence[Blocks], state_at: int | None = None) -> Transfer:
        """Save tokens from a request's blocks to shards, and a state to ``state_at`` of the arena."""
        with self._all_groups() as begun:
            for number, group in enumerate(self._groups):
                pages = group.pages(tables[group.table])
                begun.append(self._device.save(_in_section(segments, group), pages, number))
            if state_at is not None:
                begun += self._of_states(state_at, tables, self._device.save)
        return Transfers(begun)

    def _of_states(self, at: int, tables: Sequence[Blocks], copy: Callable[..., Transfer]) -> Iterator[Transfer]:
        """The transfers of a state, whose rows are to a device the tokens of its one block in each table."""
        for number, group in enumerate(self._states, len(self._groups)):
            rows = Segment(Span(0, group.layout.chunk_tokens), at + group.at, 0, 0)
            yield copy([rows], tables[group.table], group=number)

    @contextmanager
    def _all_groups(self) -> Iterator[list[Transfer]]:
        """The transfers of one copy. If the transfer of a group cannot begin, those of the others end before it raises.

        On devices that copy with the engine's cores, the engine waits for the transfers.
        """
        begun: list[Transfer] = []
        try:
            yield begun
        except BaseException:
            Transfers(begun).wait()
            raise
        if not self.overlaps_compute:
            with suppress(Exception):  # ``done`` and ``wait`` of the copy raise it again
                Transfers(begun).wait()


def _sources(
    segments: Sequence[Segment], donors: Sequence[PageSegment], group: LayerGroup
) -> Sequence[Segment | PageSegment]:
    """What a group loads: from the arena what the donors lack."""
    left = without(segments, [donor.span for donor in donors]) if donors else segments
    return [*_in_section(left, group), *(replace(donor, blocks=group.pages(donor.blocks)) for donor in donors)]


def _in_section(segments: Sequence[Segment], group: LayerGroup) -> Sequence[Segment]:
    """The segments in a group's section."""
    return [replace(segment, shard=segment.shard + group.at) for segment in segments] if group.at else segments


def first_kept(blocks: npt.NDArray[np.int64]) -> int:
    """The number of the first block that vLLM has allocated, and has not freed."""
    kept = np.flatnonzero(blocks != NULL_BLOCK)
    return int(kept[0]) if len(kept) else len(blocks)
