"""The connector's class, by the model that vLLM serves.

vLLM serves models with recurrent layers with its hybrid allocator alone, and takes that one only with connectors that
declare support for it. For models with sliding windows vLLM uses that allocator whenever a connector declares support,
and then frees the blocks that have left a window, which tokens recomputed later would need. So the class declares
support where the model has recurrent layers, and nowhere else.
"""

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from blendhub.vllm import connector

if TYPE_CHECKING:
    from vllm.v1.request import Request


class HybridConnector(connector.BlendHubConnector, SupportsHMA):
    """The connector of models with recurrent layers, which are served without reuse."""

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


# vLLM names a connector's statistics after its class, and looks the class up by that name.
HybridConnector.__name__ = connector.BlendHubConnector.__name__


def __getattr__(name: str) -> type[connector.BlendHubConnector]:
    """Make the connector's class, which vLLM takes from this module whenever it needs the class."""
    if name != connector.BlendHubConnector.__name__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = _config_up_the_stack()
    is_hybrid = config is not None and config.model_config is not None and config.model_config.is_hybrid
    return HybridConnector if is_hybrid else connector.BlendHubConnector


def _config_up_the_stack() -> VllmConfig | None:
    """The configuration of the engine for which vLLM looks up the class: it does not say which."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for one in frame.f_locals.values():
            if isinstance(one, VllmConfig):
                return one
        frame = frame.f_back
    return None
