"""What BlendHub's connector declares to vLLM, and what it hears of its workers beside another connector."""

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from blendhub.vllm.plugin import register

CONFIG = KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both")


@pytest.fixture(autouse=True)
def registered():
    register()


def test_the_hybrid_allocator_is_supported_alone_and_beside_another_connector():
    inner = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
    several: dict[str, Any] = {"kv_connector_extra_config": {"connectors": [inner]}}
    outer = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", **several)
    assert KVConnectorFactory.supports_hma_config(CONFIG)
    assert KVConnectorFactory.supports_hma_config(outer)
