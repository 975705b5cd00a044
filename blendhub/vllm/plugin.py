"""The function that vLLM calls in each of its processes, through the entry point ``vllm.general_plugins``."""


def register() -> None:
    """Make ``BlendHubConnector`` a name that ``--kv-transfer-config`` knows."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM may load its plugins more than once in a process, and refuses a name that it knows.
    if "BlendHubConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("BlendHubConnector", "blendhub.vllm.connector", "BlendHubConnector")
