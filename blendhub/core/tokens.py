"""Token ids as read-only, contiguous arrays of uint32."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blendhub.core.errors import InvalidInput

Tokens: TypeAlias = npt.NDArray[np.uint32]
TokenBuffer: TypeAlias = Tokens | bytes | bytearray | memoryview

_ITEM = np.dtype(np.uint32)


def as_tokens(buffer: Any) -> Tokens:
    """View a buffer of uint32 as a read-only array; copies only what is not contiguous and aligned.

    Lists are refused: converting one would cost more than the lookup.
    """
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != _ITEM or buffer.ndim != 1:
            raise InvalidInput(
                f"tokens must be a one-dimensional array of uint32, "
                f"got {buffer.ndim} dimension(s) of {buffer.dtype}; convert with tokens.astype(numpy.uint32)"
            )
        array = buffer
        if array.flags.c_contiguous and array.flags.aligned and not array.flags.writeable:
            return array
    elif isinstance(buffer, bytes | bytearray | memoryview):
        size = memoryview(buffer).nbytes
        if size % _ITEM.itemsize:
            raise InvalidInput(f"a token buffer holds whole uint32 values, but this one has {size} bytes")
        array = np.frombuffer(buffer, dtype=_ITEM)
    else:
        raise InvalidInput(
            f"tokens must be a numpy array of uint32 or a bytes-like object, got {type(buffer).__name__}; "
            "convert once with numpy.asarray(tokens, dtype=numpy.uint32)"
        )
    # One layout and one mutability for all callers: compiled matchers then need one specialisation.
    array = np.require(array, requirements=["C", "A"]).view()
    array.flags.writeable = False
    return array
