"""The function that vLLM calls in each of its processes, through the entry point ``vllm.general_plugins``."""

from importlib.util import find_spec


def register() -> None:
    """With vllm-ascend, have the name ``BlendHubConnector`` stand for its connector."""
    if find_spec("vllm_ascend") is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # BlendHub's own function leaves a name that is there, so the order of the two does not matter.
    KVConnectorFactory._registry.pop("BlendHubConnector", None)
    KVConnectorFactory.register_connector("BlendHubConnector", "blendhub_ascend.vllm.connector", "AscendConnector")
