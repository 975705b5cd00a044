"""Whether a hub can listen here, and whether only this user can reach it."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blendhub.hub.config import Listen
from blendhub.system.default_paths import is_private, runtime_directory
from blendhub.tools.doctor.access import as_root, quoted, trouble_with_directory, trouble_with_secret
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, fail, ok

LONGEST_PATH = 107
"""Bytes that the kernel allows for the path of a Unix socket."""

OF_EMBEDDED = "/blendhub-12345678/hub.sock"
"""The length of the rest of the path of an embedded hub's socket, in the directory for temporary files."""


def sockets(at: Circumstances) -> Iterator[Finding]:
    """Check the sockets of the configured or default hub, and the place where an embedded hub has its own."""
    wrong = [finding for listen in at.hub.listen for finding in _configured(listen)]
    if not at.hub.listen:
        wrong = [*_default(), *_embedded()]
    yield from wrong
    if not wrong:
        where = ", ".join(listen.endpoint for listen in at.hub.listen) or f"ipc://{runtime_directory()}/hub.sock"
        yield ok(f"a hub can listen at {where}, where only this user reaches it or keys are needed")


def _configured(listen: Listen) -> Iterator[Finding]:
    for name, value in listen.options.items():
        if name == "secret_key" and isinstance(value, str) and os.path.isfile(value):
            yield from trouble_with_secret(Path(value), "the secret key")
    if listen.endpoint.startswith("ipc://"):
        yield from _socket(Path(listen.endpoint.removeprefix("ipc://")).absolute())


def _default() -> Iterator[Finding]:
    folder = runtime_directory()
    if not os.path.lexists(folder):
        if os.path.isdir(folder.parent) and os.access(folder.parent, os.W_OK | os.X_OK):
            return
        yield fail(f"{folder}, for the default socket, cannot be made", "unset XDG_RUNTIME_DIR")
        return
    found = folder.lstat()
    if is_private(found):
        yield from _socket(folder / "hub.sock")
        return
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    yield fail(
        f"others can enter {folder}, or it is not a directory of uid {os.getuid()}: no hub listens in it",
        f"chmod 700 {quoted(folder)}" if is_ours else as_root(f"rm -r {quoted(folder)}"),
    )


def _embedded() -> Iterator[Finding]:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        yield fail(
            "no directory for temporary files can be written, and embedded hubs listen in one",
            as_root("chmod 1777 /tmp"),
        )
        return
    length = len(os.fsencode(folder + OF_EMBEDDED))
    if length > LONGEST_PATH:
        yield fail(
            f"the socket of an embedded hub in {folder} would have a path of {length} bytes, above {LONGEST_PATH}",
            "export TMPDIR=/tmp",
        )


def _socket(path: Path) -> Iterator[Finding]:
    length = len(os.fsencode(path))
    if length > LONGEST_PATH:
        yield fail(
            f"the path of the socket {path} has {length} bytes, more than {LONGEST_PATH}",
            f"blendhub serve --endpoint ipc://{runtime_directory()}/hub.sock",
        )
        return
    yield from trouble_with_directory(path.parent, what="a hub's socket")
    if not os.path.lexists(path) or not os.access(path.parent, os.X_OK):
        return
    if not path.is_socket():
        yield fail(f"{path} is not a socket, so no hub can listen there", f"rm -r {quoted(path)}")
    else:
        yield from trouble_with_secret(path, "the socket")
