"""Arrays that grow where they are."""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 1 << 21


class GrowingArray:
    """A zero-filled array over anonymous memory that the kernel can enlarge without holding it twice.

    Growing invalidates ``view``: a view that is kept across a call to ``grow`` makes that call fail.
    """

    def __init__(self, dtype: npt.DTypeLike, rows: int, width: int = 0) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * max(width, 1)
        size = _whole_pages(rows * self._row_bytes)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._open(rows)

    def __len__(self) -> int:
        return len(self.view)

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def grow(self, rows: int) -> None:
        """Make room for at least this many rows; what is there stays."""
        del self.view
        self._memory.resize(_whole_pages(rows * self._row_bytes))
        self._open(rows)

    def _open(self, rows: int) -> None:
        if len(self._memory) >= HUGE_PAGE:
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # random access misses the TLB far less
        flat: npt.NDArray[Any] = np.frombuffer(self._memory, self._dtype, rows * max(self._width, 1))
        self.view = flat.reshape(rows, self._width) if self._width else flat


def _whole_pages(size: int) -> int:
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
