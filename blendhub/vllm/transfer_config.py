"""``--kv-transfer-config`` as a whole: vLLM's own keys, and BlendHub's within them. Needs neither vLLM nor torch."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from blendhub.core.errors import BlendHubError, OptionError
from blendhub.framework.host import PluginHost
from blendhub.vllm.settings import EXTRA, mistakes_in, mistakes_in_settings

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


def mistakes_in_transfer_config(given: Any, host: PluginHost, device: str | None) -> list[BlendHubError]:
    """Everything that is wrong in what ``--kv-transfer-config`` is given, a sentence each; see also settings.py."""
    if not isinstance(given, Mapping):
        return [OptionError(f"{FLAG}: expected a mapping of keys to values, got {given!r}")]
    mistakes = mistakes_in(FLAG, TransferConfig, given)
    if isinstance(given.get(EXTRA, {}), Mapping):
        mistakes += mistakes_in_settings(given.get(EXTRA, {}), host, device)
    return mistakes
