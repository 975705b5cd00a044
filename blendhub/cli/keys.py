"""``blendhub keys``: creates the keys that a hub needs to listen beyond this machine."""

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from blendhub.contracts import Transport
from blendhub.contracts.transport import KeyFiles
from blendhub.framework.host import PluginHost


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        help="create keys for a hub that other machines reach",
        description="Create keys for a hub and for its clients. Keys are never overwritten.",
    )
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", type=Path, help="where; default: blendhub/keys in ~/.config"
    )
    parser.add_argument("--transport", metavar="NAME", default="zmq", help="the transport that uses them (default zmq)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    transport: Transport = PluginHost.discover().create("transport", arguments.transport)
    directory = (arguments.directory or _default_directory()).absolute()
    keys = transport.make_keys(directory)
    print("\n".join(f"made {file}" for file in keys.files), _how_to_use(keys, arguments.transport), sep="\n\n")
    return 0


def _default_directory() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".config") / "blendhub" / "keys"


def _how_to_use(keys: KeyFiles, transport: str) -> str:
    server, client = _pairs(" = ", keys.server_options), _pairs(": ", keys.client_options)
    files = ", ".join(Path(file).name for file in keys.client_options.values())
    return f"""In hub.toml:

[[listen]]
endpoint = "tcp://0.0.0.0:7070"
transport = "{transport}"
options = {{{server}}}

At a client, with {files} copied to its machine:

HubClient("tcp://HOST:7070", "{transport}", {{{client}}})
blendhub check --endpoint tcp://HOST:7070

Anyone who has the client's secret key can connect: keep secret keys secret, and send them only over encrypted channels.
To admit another client, copy its public key to the directory of the clients' public keys."""


def _pairs(equals: str, options: dict[str, str]) -> str:
    # JSON, TOML and Python write strings alike, and TOML takes quoted keys.
    return ", ".join(f'"{name}"{equals}{msgspec.json.encode(value).decode()}' for name, value in options.items())
