"""The settings of a hub: one structure, read from TOML and checked before anything starts."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import tomli_w
from msgspec import Meta

from blendhub.client.wire import client_codec
from blendhub.contracts import Transport
from blendhub.core.errors import InvalidInput, OptionError, PluginError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.framework.named_plugins import NamedPlugin, check_plugins
from blendhub.framework.options import describe_options, parse_options

HubPlacement: TypeAlias = Literal["thread", "process"]
"""Where an embedded hub runs: in a thread of its owner, or in a separate process."""


DEFAULT_TRANSPORT = PluginChoice("zmq")


class Listen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An endpoint at which the hub listens."""

    endpoint: Annotated[str, Meta(min_length=1, description="where clients connect, as the transport writes it")]
    transport: Annotated[str, Meta(description="a transport by name")] = DEFAULT_TRANSPORT.name
    options: Annotated[dict[str, Any], Meta(description="the transport's options")] = {}


class StoreChoice(PluginChoice, frozen=True, forbid_unknown_fields=True):
    """The choice of a store, which may leave the name out."""

    name: Annotated[str, Meta(max_length=1024, description="a store by name")] = "disk"


class HubConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: Annotated[
        tuple[Listen, ...],
        Meta(description="where the hub listens; empty: a Unix socket that only this user can reach"),
    ] = ()
    arena_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description="shared memory for KV; 0: a quarter of what is available, at most half of /dev/shm and 64 GiB, "
            "divided by the machine's data-parallel engines",
        ),
    ] = 0.0
    store: Annotated[StoreChoice | None, Meta(description="keeps KV beyond memory and restarts")] = None
    silence_s: Annotated[float, Meta(gt=0, description="a process that sends nothing for so long is given up")] = 15.0
    metrics: Annotated[str, Meta(description="HOST:PORT of /metrics and /healthz; port 0: any; empty: not served")] = (
        "127.0.0.1:0"
    )

    def __post_init__(self) -> None:
        if self.metrics:
            host_and_port(self.metrics)


def host_and_port(metrics: str) -> tuple[str, int]:
    """The two parts of HOST:PORT; raises OptionError if that is something else."""
    host, _, port = metrics.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise OptionError(f"metrics = {metrics!r} should be HOST:PORT, such as 127.0.0.1:9464")
    return host, int(port)


def plugins_of_hub(config: HubConfig, owner: str = "") -> Iterator[NamedPlugin]:
    """Every plugin that a hub with this configuration uses. ``owner``: what stands before the keys in messages."""
    if store := config.store:
        yield NamedPlugin(f"{owner}store", "store", store.name, store.options)
    for number, listen in enumerate(config.listen):
        yield NamedPlugin(f"{owner}listen[{number}]", "transport", listen.transport, listen.options)


def check_hub_config(config: HubConfig, host: PluginHost, owner: str = "") -> None:
    """Raise PluginError or OptionError for the first plugin, option or endpoint that no hub can have."""
    check_plugins(plugins_of_hub(config, owner), host)
    for number, listen in enumerate(config.listen):
        if listen.endpoint in (other.endpoint for other in config.listen[:number]):
            raise OptionError(f"{owner}listen[{number}].endpoint = {listen.endpoint!r} is there twice; leave one out")
        transport = PluginChoice(listen.transport, listen.options)
        check_endpoint(f"{owner}listen[{number}].endpoint", listen.endpoint, transport, host)


def check_endpoint(key: str, endpoint: str, choice: PluginChoice, host: PluginHost) -> None:
    """Raise OptionError if the transport does not understand the endpoint; nothing need listen there."""
    try:
        transport: Transport = host.create("transport", choice.name, choice.options)
    except PluginError:  # it needs another machine
        return
    if not endpoint.startswith(transport.schemes):
        schemes = " or ".join(transport.schemes)
        raise OptionError(
            f"{key} = {endpoint!r}: the transport {choice.name!r} understands endpoints that begin with {schemes}; "
            "name such a one, or another transport for it"
        )
    try:
        transport.connect(endpoint, client_codec()).close()
    except InvalidInput as error:
        raise OptionError(f"{key}: {error}") from None


def load_config(path: Path | None = None) -> HubConfig:
    """The configuration in a TOML file, or the defaults; errors name the file and the key."""
    if path is None:
        return HubConfig()
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path} is not TOML: {error}") from error
    return parse_options(str(path), HubConfig, settings)


def as_toml(config: HubConfig) -> str:
    """Every key with its value, and its meaning in a comment above; ``load_config`` reads it back."""
    # Last, since TOML counts all keys that follow a table's name as its own; shown as comments where there are none.
    tables: dict[str, Any] = {
        "listen": (Listen(endpoint="ipc:///run/user/1000/blendhub/hub.sock"),),
        "store": StoreChoice(),
    }
    written = []
    meanings = {facts["name"]: facts["description"] for facts in describe_options(HubConfig)}
    for name in [*(name for name in meanings if name not in tables), *tables]:
        value = getattr(config, name)
        is_set = bool(value) or name not in tables
        text = tomli_w.dumps({name: msgspec.to_builtins(value if is_set else tables[name])})
        lines = text.rstrip().splitlines()
        written += [f"# {meanings[name]}", *(lines if is_set else (f"# {line}".rstrip() for line in lines)), ""]
    return "\n".join(written)
