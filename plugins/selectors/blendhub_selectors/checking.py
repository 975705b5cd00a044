"""Refuses what is no valid input of a selector, before anything is picked."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selector
from blendhub.errors import InvalidInput
from blendhub.plan import Span


def check_input(
    selector: Selector,
    moved: Sequence[Span],
    ratio: float,
    block_tokens: int,
    scores: npt.NDArray[np.float32] | None,
) -> None:
    """Raise InvalidInput for arguments of ``select`` that break the contract."""
    end = _checked_end(moved)
    # Written so that a ratio that is not a number fails too.
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise InvalidInput(f"ratio is {ratio!r}, but must be a number from 0 to 1")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidInput(f"block_tokens is {block_tokens!r}, but must be an integer of at least 1")
    if selector.probe_layer == 0:
        if scores is not None:
            raise InvalidInput(f"{type(selector).__name__} asks for no probe, but was given scores; leave them out")
    elif not isinstance(scores, np.ndarray) or scores.dtype != np.float32 or scores.ndim != 1:
        raise InvalidInput(
            f"scores must be a float32 array of one dimension, got {_described(scores)}; "
            f"take them at layer {selector.probe_layer}"
        )
    elif len(scores) < end:
        raise InvalidInput(f"there are {len(scores)} scores, but moved tokens up to {end}; give one for each position")


def _checked_end(moved: Sequence[Span]) -> int:
    end = 0
    for span in moved:
        if not isinstance(span, Span):
            raise InvalidInput(f"moved has {span!r} in it, but must hold spans only")
        if span.start < end or not len(span):
            raise InvalidInput(f"moved has {span} in it, which must not be empty, and start at {end} or later")
        end = span.end
    return end


def _described(scores: object) -> str:
    if isinstance(scores, np.ndarray):
        return f"{scores.dtype} of shape {scores.shape}"
    return type(scores).__name__
