"""``--kv-transfer-config`` as a whole: vLLM's own keys, and BlendHub's within them. Needs neither vLLM nor torch."""

from typing import Any, Literal

import msgspec

from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options
from blendhub.vllm.settings import EXTRA, Settings, read_settings

FLAG = "kv-transfer-config"


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's KVTransferConfig, as far as it goes with BlendHub."""

    kv_connector: Literal["BlendHubConnector"]
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"]
    kv_connector_extra_config: dict[str, Any] = {}
    engine_id: str | None = None
    kv_buffer_device: str = ""
    kv_port: int = 0
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"


def check_transfer_config(config: Any, host: PluginHost, device: str | None) -> Settings:
    """The settings in the value of ``--kv-transfer-config``; raises an error for the first mistake in any of it."""
    parse_options(FLAG, TransferConfig, config)
    return read_settings(config.get(EXTRA, {}), host, device, runs_here=False)
