"""What is checked, and what a check finds."""

from functools import partial
from pathlib import Path

import msgspec

from blendhub.cli.json_input import read_flag
from blendhub.core.errors import OptionError, PluginError
from blendhub.framework.host import PluginHost
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, Listen, check_hub_config, load_config
from blendhub.system.default_paths import runtime_directory
from blendhub.vllm.settings import Settings
from blendhub.vllm.transfer_config import check_transfer_config


class Finding(msgspec.Struct, frozen=True):
    verdict: str
    sentence: str
    command: str = ""
    """The command that mends it; empty where nothing is wrong, or where only an edit mends it."""


ok, warn, fail = (partial(Finding, verdict) for verdict in ("ok", "warn", "fail"))
"""All is well; BlendHub works, but worse than it could; something does not work."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    host: PluginHost
    device: str | None = None
    """What vLLM runs on, if the user named it."""
    role: str = ""
    """vLLM's ``kv_role``; empty: no engine's configuration is checked."""
    settings: Settings = Settings()
    hub: HubConfig = HubConfig()
    """The hub that would run here."""
    hub_file: str = ""
    """The file with the configuration of a hub; empty: none was given."""
    mistake: str = ""
    """The first one in the configuration, which is then taken for the default one."""


def read_subject(config: str, device: str | None) -> Subject:
    """What a person names: the value of a flag or a file with it, a hub's file, or nothing."""
    subject = Subject(host=PluginHost.discover(), device=device)
    try:
        if config.endswith(".toml"):
            hub = load_config(Path(config))
            check_hub_config(hub, subject.host, f"{config}: ")
            return msgspec.structs.replace(subject, hub=hub, hub_file=config)
        if config:
            flag = read_flag(config)
            settings = check_transfer_config(flag, subject.host, device)
            return msgspec.structs.replace(subject, role=flag["kv_role"], settings=settings, hub=settings.hub)
    except (OptionError, PluginError) as error:
        return msgspec.structs.replace(subject, mistake=str(error))
    return subject


def hubs_of(subject: Subject) -> tuple[Listen, ...]:
    """The endpoints of the hubs that are named, or the default endpoint if a hub runs there."""
    chosen = subject.settings.transport or DEFAULT_TRANSPORT
    if endpoint := subject.settings.endpoint:
        return (Listen(endpoint=endpoint, transport=chosen.name, options=chosen.options),)
    socket = runtime_directory() / "hub.sock"
    return subject.hub.listen or ((Listen(endpoint=f"ipc://{socket}"),) if socket.exists() else ())
