"""A plugin of pytest for vLLM's tests of whole engines, which ask for a GPU and for a model of the Hugging Face Hub."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import recorder
import vllm.v1.engine.async_llm  # noqa: F401 - imported before its platform is said to be another one
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from blendhub.vllm.connector import BlendHubConnector
from harness.engines.real_model import make_real_model

BLOCK = 32
"""The attention of CPUs supports no blocks of 16 tokens, which tests leave to vLLM."""
MODEL = "models--meta-llama--Llama-3.2-1B-Instruct"
"""Such a model, but a smaller one, is in its place."""


class StatusRecorder(BlendHubConnector):
    """BlendHub as an engine runs it. It writes down how requests end, where the test reads that."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        self._statuses = Path(transfer.kv_connector_extra_config["status_file"])
        transfer.kv_connector_extra_config = {"blendhub": {"hub": {"arena_gib": 0.1, "metrics": ""}}}
        super().__init__(vllm_config, role, kv_cache_config)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._statuses.open("a") as statuses:
            statuses.write(f"{request.status.name}\n")
        return super().request_finished_all_groups(request, block_ids)


def pytest_configure() -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    update = CpuPlatform.check_and_update_config

    def update_for_tests(config: VllmConfig) -> None:
        config.cache_config.block_size = BLOCK
        update(config)
        # As on GPUs: a process that is forked knows what a test has patched and registered.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(update_for_tests)  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Have these tests not skip themselves."""
    with patch.object(type(current_platform), "is_cuda", return_value=True):
        return (yield)


def pytest_collection_finish() -> None:
    model = Path(os.environ["HF_HOME"], "hub", MODEL)
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text("0")
    (model / "snapshots").mkdir(exist_ok=True)
    (model / "snapshots" / "0").unlink(missing_ok=True)
    (model / "snapshots" / "0").symlink_to(make_real_model())
    if recorder.OURS:
        KVConnectorFactory._registry["DummyKVConnector"] = lambda: StatusRecorder


def pytest_runtest_setup() -> None:
    if recorder.OURS:
        recorder.asked()  # the engine asks in another process, which the record does not see
