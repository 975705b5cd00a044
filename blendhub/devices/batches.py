"""The parts of a transfer that pass through staging, as the queues of a device with streams see them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Segment
from blendhub.core.layout import KVLayout


class Slice(NamedTuple):
    """A range of consecutive bytes of the arena, and its place in staging."""

    at: int
    """Offset in the arena."""
    staging_at: int
    nbytes: int


class AnySlice(Protocol):
    """A ``Slice``, or a device's own tuple with the same fields and more."""

    @property
    def at(self) -> int: ...
    @property
    def staging_at(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Batch(Protocol):
    """The work between two uses of a stream's staging."""

    @property
    def slices(self) -> Sequence[AnySlice]:
        """The contents of staging; empty: the mover reads and writes the arena itself."""


class BatchGroup(Protocol):
    """Batches that share one table, because each copy of a table costs the host time."""

    @property
    def table(self) -> npt.NDArray[Any]:
        """The table that the mover needs in device memory."""

    @property
    def batches(self) -> Sequence[Any]: ...


class BatchPlanner(ABC):
    """Splits transfers into batches that each fit into the staging of one stream. Arithmetic without I/O."""

    layout: KVLayout
    table_bytes: int
    """Device memory of a stream for the table of a group."""
    staging_bytes: int
    """Device memory of a stream for the slices of a batch."""

    @property
    def layer_bytes(self) -> int:
        """The bytes that one layer keeps of a chunk. Staging must hold as many."""
        return self.layout.keys_at(1)

    @abstractmethod
    def batch_groups(
        self,
        segments: Iterable[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int,
        stage_partial_chunks: bool,
    ) -> Iterator[BatchGroup]:
        """The batches of the segments' tokens from ``skip_prefix_n_tokens`` on, in groups."""

    @abstractmethod
    def rows_of(self, batch: Any) -> Iterable[AnySlice]:
        """The parts of the batch's slices that a save may write: the rows of its segments."""


class Mover(ABC):
    """Moves a batch between memory that the device reaches and the engine's pages, in a stream."""

    @abstractmethod
    def rows_to_pages(
        self, stream: Any, memory: torch.Tensor, table: torch.Tensor, group: BatchGroup, batch: Any
    ) -> None:
        """Write the batch to pages. ``memory`` is the staging or the arena, ``table`` the group's in device memory."""

    @abstractmethod
    def pages_to_rows(
        self, stream: Any, memory: torch.Tensor, table: torch.Tensor, group: BatchGroup, batch: Any
    ) -> None:
        """Read the batch from pages."""


def covering(slices: Iterable[AnySlice]) -> list[slice]:
    """The slices' places in staging; neighbours are joined."""
    joined: list[slice] = []
    for one in slices:
        if joined and joined[-1].stop == one.staging_at:
            joined[-1] = slice(joined[-1].start, one.staging_at + one.nbytes)
        else:
            joined.append(slice(one.staging_at, one.staging_at + one.nbytes))
    return joined
