"""``blendhub keys``: creates the keys that a hub needs to listen beyond this machine."""

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from blendhub.errors import InvalidInput, PluginError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        help="create keys for a hub that other machines reach",
        description="Create a pair of CURVE keys for a hub and one for its clients. Keys are never overwritten.",
    )
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", type=Path, help="where; default: blendhub/keys in ~/.config"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        # Imported here, because blendhub works without blendhub-transports.
        from blendhub_transports.keys import make_keys
    except ImportError as error:
        raise PluginError(
            f"cannot create keys without blendhub-transports ({error}); pip install blendhub-transports"
        ) from error
    directory = (arguments.directory or _default_directory()).absolute()
    try:
        files = make_keys(directory)
    except OSError as error:
        raise InvalidInput(
            f"cannot write keys to {directory}: {error.strerror}; name a directory that you may write to"
        ) from error
    print("\n".join(f"made {file}" for file in files), _how_to_use(directory), sep="\n\n")
    return 0


def _default_directory() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".config") / "blendhub" / "keys"


def _how_to_use(directory: Path) -> str:
    hub = _pairs(" = ", secret_key=directory / "server.secret", client_keys=directory / "clients")
    client = _pairs(": ", secret_key=directory / "client.secret", server_key=directory / "server.public")
    return f"""In hub.toml:

[[listen]]
endpoint = "tcp://0.0.0.0:7070"
options = {{{hub}}}

At a client, with client.secret and server.public copied to its machine:

HubClient("tcp://HOST:7070", options={{{client}}})
blendhub top --endpoint tcp://HOST:7070 --options '{{{client}}}'

To admit a client with its own key pair, copy its public key to {directory / "clients"} as NAME.public.
Anyone who has client.secret can connect: keep secret keys secret, and send them only over encrypted channels."""


def _pairs(equals: str, **paths: Path) -> str:
    # Strings are written alike in JSON, TOML and Python; so are keys, but for TOML, which also takes quoted ones.
    return ", ".join(f'"{name}"{equals}{msgspec.json.encode(str(path)).decode()}' for name, path in paths.items())
