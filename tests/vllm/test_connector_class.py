"""Which class of BlendHub's vLLM gets, by the model."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from blendhub.vllm import connector_class
from blendhub.vllm.connector import BlendHubConnector
from blendhub.vllm.plugin import register

CONFIG = KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both")


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.mark.parametrize("is_hybrid", [True, False])
def test_support_for_the_hybrid_allocator_depends_on_the_model(is_hybrid):
    config = VllmConfig()
    config.model_config = SimpleNamespace(is_hybrid=is_hybrid)
    assert KVConnectorFactory.supports_hma_config(CONFIG) is is_hybrid


def test_beside_another_connector_too():
    config = VllmConfig()
    config.model_config = SimpleNamespace(is_hybrid=True)
    inner = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}
    several = {"kv_connector_extra_config": {"connectors": [inner]}}
    outer = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", **several)
    assert KVConnectorFactory.supports_hma_config(outer)


def test_without_a_configuration_it_is_the_usual_class():
    assert KVConnectorFactory.get_connector_class_by_name("BlendHubConnector") is BlendHubConnector


def test_statistics_find_the_class_of_either_kind_by_its_name():
    assert connector_class.HybridConnector.__name__ in KVConnectorFactory._registry


def test_another_name_is_an_attribute_that_the_module_lacks():
    with pytest.raises(AttributeError, match="connector_class' has no attribute 'Blend'"):
        connector_class.Blend  # noqa: B018


def test_the_blocks_of_all_groups_of_a_request_end_as_those_of_one(monkeypatch):
    ended = []
    monkeypatch.setattr(
        BlendHubConnector, "request_finished", lambda self, *given: ended.append(given) or (False, None)
    )
    connector = object.__new__(connector_class.HybridConnector)
    assert connector.request_finished_all_groups("request", ([1, 2], [3])) == (False, None)
    assert ended == [("request", [1, 2])]
