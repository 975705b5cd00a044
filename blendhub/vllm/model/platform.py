"""The interface of a platform: what BlendHub's forwards need that depends on whose model runner serves the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata, MLAAttentionImpl
from vllm.v1.worker.utils import AttentionGroup

from blendhub.vllm.model.runner import Inputs

Tensors = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each ``[tokens, heads, width]``."""

WriteHook = tuple[str, Callable[..., Tensors]]
"""The method of an attention layer's ``impl`` that writes KV, and a function that finds the KV in its arguments."""


class Platform(ABC):
    """Chosen once, when the model is loaded."""

    @abstractmethod
    def to_device(self, numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        """The numbers on the model's device, without waiting for it."""

    @abstractmethod
    def slots(self, slots: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        """Slots on the model's device, in the dtype that the layers write with."""

    @abstractmethod
    def table_width(self, n_blocks: int, block_size: int) -> int:
        """How wide a block table for so many blocks must be."""

    @abstractmethod
    def prepare_group(self, own: AttentionGroup, theirs: AttentionGroup) -> None:
        """Make a group with builders of BlendHub's own equal to the runner's group, apart from the builders' state."""

    @abstractmethod
    def build(self, group: AttentionGroup, common: CommonAttentionMetadata) -> Any:
        """The metadata of the group's layers."""

    @abstractmethod
    def forward_context(
        self,
        metadata: dict[str, Any],
        config: VllmConfig,
        inputs: Inputs,
        slots: dict[str, torch.Tensor],
    ) -> AbstractContextManager[None]:
        """The context of one forward. After it, everything that a step under way has set is as before."""

    @abstractmethod
    def write_hook(self, attention: Any) -> WriteHook:
        """Where the layer's KV passes by on its way to the pages, before anything is written."""

    @abstractmethod
    def write(self, attention: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write KV, as found by the hook, to the layer's pages."""


def keeps_latent(attention: Any) -> bool:
    """Whether the layer keeps one vector a token that serves as key and value (MLA)."""
    # Not asked of the backend: those of vllm-ascend do not say.
    return isinstance(getattr(attention, "impl", None), MLAAttentionImpl)


def keeps_index_keys(attention: Any) -> bool:
    """Whether the layer keeps the keys of an indexer, which picks the tokens that attention reads (DeepSeek V3.2)."""
    # Only vLLM's class of such layers, and those derived from it, have this property.
    return hasattr(attention, "uses_shuffled_layout")
