"""Makes and reads CURVE keys in files; a secret key must be readable by its owner only."""

import os
import struct
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from blendhub.contracts.transport import KeyFiles
from blendhub.core.errors import InvalidInput, OptionError

SECRET_NAMES = ("server.secret", "client.secret")
PUBLIC_NAMES = ("server.public", "clients/client.public")


class KeyPair(msgspec.Struct, frozen=True):
    public: bytes
    secret: bytes


def make_keys(directory: Path) -> KeyFiles:
    """Make a pair of keys for a server and one for its clients: four files."""
    secrets = [directory / name for name in SECRET_NAMES]
    publics = [directory / name for name in PUBLIC_NAMES]
    for path in (*secrets, *publics):
        if path.exists():
            raise InvalidInput(f"{path} exists; keys are never overwritten: choose another directory or remove it")
    try:
        for parent in (directory, publics[-1].parent):
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for secret_path, public_path in zip(secrets, publics, strict=True):
            public, secret = zmq.curve_keypair()
            _write(secret_path, secret)
            _write(public_path, public)
    except OSError as error:
        raise InvalidInput(
            f"cannot write keys to {directory}: {error.strerror}; name a directory that you may write to"
        ) from error
    return KeyFiles(
        files=(*secrets, *publics),
        server_options={"secret_key": str(secrets[0]), "client_keys": str(publics[-1].parent)},
        client_options=client_options_beside(directory),
    )


def client_options_beside(directory: Path) -> dict[str, str]:
    """The options of a client whose keys were made with the server's, in this directory."""
    return {"secret_key": str(directory / SECRET_NAMES[1]), "server_key": str(directory / PUBLIC_NAMES[0])}


def read_secret(option: str, path: str) -> KeyPair:
    """The pair whose secret key is in the file that ``option`` names."""
    if not path:
        raise OptionError(f"option {option} is empty, expected the file of a secret key; make one with: blendhub keys")
    secret = _read(option, Path(path))
    mode = Path(path).stat().st_mode
    if mode & 0o077:
        raise OptionError(f"option {option}: others can read {path} (mode {mode & 0o777:o}); run: chmod 600 {path}")
    return KeyPair(zmq.curve_public(secret), secret)


def read_public(option: str, path: str) -> bytes:
    if not path:
        raise OptionError(f"option {option} is empty, expected the file of a public key; make one with: blendhub keys")
    return _read(option, Path(path))


def read_clients(option: str, directory: str) -> frozenset[bytes]:
    """The public keys in ``directory``, as the 32 raw bytes that ZeroMQ compares."""
    files = sorted(Path(directory).glob("*.public")) if directory else []
    if not files:
        raise OptionError(
            f"option {option} = {directory!r} is not a directory with files *.public, one for each client that may "
            "connect; make them with: blendhub keys"
        )
    return frozenset(z85.decode(_read(option, file)) for file in files)


def _write(path: Path, key: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key + b"\n")


def _read(option: str, path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        if len(key) == 40 and len(z85.decode(key)) == 32:
            return key
    except OSError as error:
        raise OptionError(f"option {option}: {path} cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, struct.error):  # characters that Z85 does not have
        pass
    raise OptionError(f"option {option}: {path} holds no key, which is 40 characters; make one with: blendhub keys")
