"""What differs between the versions of vLLM that BlendHub serves with: found by what is there, not by their numbers."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

SHOWS_BLOCKS = hasattr(KVConnectorBase_V1, "bind_kv_cache_manager")
"""Whether a connector can ask for the blocks of a request, and say which requests' loads have failed. vLLM 0.23, which
vllm-ascend needs, has neither: ``RequestBlocks`` follows the blocks, and a load fails by its blocks."""


def build_metadata(group: AttentionGroup, common: CommonAttentionMetadata) -> Any:
    """The metadata of a group's layers, for one of BlendHub's forwards."""
    # Since 0.32 the group fits block tables to kernels whose blocks are smaller than vLLM's, before its builder builds.
    build = getattr(group, "build_metadata", None)
    return build(common) if build else group.get_metadata_builder().build(0, common)


def copy_block_stride(own: AttentionGroup, theirs: AttentionGroup) -> None:
    """Have the kernels of ``own`` find the blocks where those of ``theirs`` do."""
    # Since 0.32 vLLM may pack the pages of several layers into a block.
    if hasattr(theirs, "kernel_block_stride"):
        own.kernel_block_stride = theirs.kernel_block_stride
