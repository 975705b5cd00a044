"""Metadata builders of BlendHub's own, whose memory no kernel still reads when they are used again."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.utils import AttentionGroup

NewEvent = Callable[[], Any]


class OwnGroup:
    """The attention group of some layers.

    Work of one stream is in order, so a builder may overwrite device memory at once. But the device reads host memory
    later, when a copy's turn has come. Where a builder keeps such memory, two take turns, and each waits for its own
    last copies. A whole forward was submitted after these, so the device has usually done them.
    """

    def __init__(self, create: Callable[[], AttentionGroup], new_event: NewEvent | None) -> None:
        """``new_event``: creates an event of the device; None where the host computes."""
        self._create = create
        self._new_event = new_event
        self._turns = [_Turn(create(), None)]

    @property
    def first(self) -> AttentionGroup:
        return self._turns[0].group

    def build(self, build: Callable[[AttentionGroup], Any]) -> Any:
        """Call ``build`` with the group whose turn it is."""
        turn = self._turns.pop(0)
        if turn.copied:
            turn.copied.synchronize()
        built = build(turn.group)
        if self._new_event and keeps_host_memory(turn.group.get_metadata_builder()):
            turn.copied = turn.copied or self._new_event()
            turn.copied.record()
            if not self._turns:
                self._turns.append(_Turn(self._create(), None))
        self._turns.append(turn)
        return built


class _Turn:
    def __init__(self, group: AttentionGroup, copied: Any) -> None:
        self.group = group
        self.copied = copied
        """Reached when the device has read all host memory of the builder; None: it keeps none."""


def keeps_host_memory(builder: Any) -> bool:
    """Whether a builder, or what it plans with, has memory of the host that it may copy from.

    It may get some when it is used, so this holds for what it has been used for.
    """
    return any(_is_host_memory(one) for value in _members(builder) for one in (value, *_members(value)))


def _members(owner: Any) -> Iterator[Any]:
    values = owner.values() if isinstance(owner, dict) else owner if isinstance(owner, list | tuple) else ()
    yield from values
    # Of vLLM's configuration every builder has a reference, and it leads to the whole model.
    if hasattr(owner, "__dict__") and not type(owner).__module__.startswith(("vllm.config", "vllm.v1.kv_cache")):
        yield from vars(owner).values()


def _is_host_memory(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.device.type == "cpu" and one.numel() > 0
    return isinstance(one, np.ndarray)
