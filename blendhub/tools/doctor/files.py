"""Sockets, the store's directory and what killed hubs left: whether this user alone can use them."""

import os
import shlex
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blendhub.hub.config import Listen
from blendhub.hub.memory.segments import leftovers
from blendhub.system.default_paths import default_disk_store, is_private, runtime_directory
from blendhub.tools.doctor.finding import Circumstances, Finding, fail, ok, warn


def as_root(command: str) -> str:
    """The command with ``sudo`` unless the user is root."""
    return command if os.geteuid() == 0 else f"sudo sh -c {shlex.quote(command)}"


def quoted(path: Path | str) -> str:
    """A path quoted for use in a command."""
    return shlex.quote(str(path))


def trouble_with_directory(path: Path, *, what: str) -> Iterator[Finding]:
    """Findings if this user cannot keep ``what`` in a directory, which may not exist yet, or others can reach it."""
    existing = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not existing.is_dir():
        yield fail(f"{existing} is not a directory, so {what} cannot be kept there", f"rm {quoted(existing)}")
    elif existing != path:
        if not _is_usable(existing):
            yield fail(
                f"{path} does not exist, and this user cannot make it in {existing}",
                as_root(f"install -d -m 700 -o {os.getuid()} {quoted(path)}"),
            )
    elif not _is_usable(path):
        command = f"chmod u+rwx {quoted(path)}" if _is_mine(path) else as_root(f"chown -R {os.getuid()} {quoted(path)}")
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            command = as_root(f"mount -o remount,rw {quoted(_mount_of(path))}")
        yield fail(f"this user cannot keep {what} in {path}: {_facts(path)}", command)
    elif _others_can_replace(path):
        yield fail(f"others can replace {what} in {path}: {_facts(path)}", f"chmod go-w {quoted(path)}")


def trouble_with_secret(path: Path, what: str) -> Iterator[Finding]:
    """A finding if others can read or write a file or a directory that only its owner should."""
    found = path.lstat()
    if found.st_uid != os.getuid():
        yield fail(f"{what} {path} belongs to uid {found.st_uid}", as_root(f"chown -R {os.getuid()} {quoted(path)}"))
    elif found.st_mode & 0o022:
        yield fail(f"others can write to {what} {path}: {_facts(path)}", f"chmod go-rwx {quoted(path)}")
    elif found.st_mode & 0o055:
        yield warn(f"others can read {what} {path}: {_facts(path)}", f"chmod go-rwx {quoted(path)}")


def _is_usable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK | os.X_OK)


def _is_mine(path: Path) -> bool:
    return path.stat().st_uid == os.getuid()


def _others_can_replace(path: Path) -> bool:
    """Whether others than this user and root can rename files there: the sticky bit forbids it."""
    mode = path.stat().st_mode
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def _facts(path: Path) -> str:
    found = path.stat()
    read_only = ", mounted read-only" if os.statvfs(path).f_flag & os.ST_RDONLY else ""
    return f"it is of uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}{read_only}"


def _mount_of(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if os.path.ismount(one))


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


LEAST_FREE_BYTES = 2**30


def stores(at: Circumstances) -> Iterator[Finding]:
    folder = store_directory(at)
    if folder is None:
        yield ok("no store is configured: KV that is evicted is lost")
        return
    # What keeps others out altogether comes first: it also keeps them from replacing anything.
    wrong = list(trouble_with_secret(folder, "the KV in")) if folder.is_dir() else []
    wrong = wrong or list(trouble_with_directory(folder, what="KV"))
    if not wrong and folder.is_dir():
        wrong = list(_space_left(folder))
    yield from wrong or [ok(f"KV can be stored in {folder}, and only this user can read it there")]


def store_directory(at: Circumstances) -> Path | None:
    """The directory of the configured store, or of the default one if that exists; None: there is no store."""
    store = at.hub.store
    if store is None:
        return default_disk_store() if default_disk_store().exists() else None
    path = store.options.get("path")
    if isinstance(path, str) and path:
        return Path(path).expanduser().absolute()
    return default_disk_store() if store.name == "disk" else None


def _space_left(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        yield warn(
            f"the disk of {folder} has {free / 2**20:.0f} MiB left, so chunks will not be saved any more",
            f"du -xh --max-depth=1 {quoted(Path(os.path.realpath(folder)).parent)} | sort -h",
        )


LEAST_AGE_S = 5.0


def leftovers_of_hubs(at: Circumstances) -> Iterator[Finding]:
    segments = [(path, path.stat().st_size) for path in leftovers(LEAST_AGE_S)]
    if segments:
        size = sum(size for _, size in segments) / 2**30
        names = " ".join(quoted(path) for path, _ in segments)
        yield warn(f"killed hubs left {size:.2f} GiB of shared memory; the next hub removes it", f"rm {names}")
    dead = [path for path in _hub_sockets(at) if _is_dead(path)]
    if dead:
        names = " ".join(map(quoted, dead))
        yield warn(f"{len(dead)} sockets are left at which no hub listens any more: {names}", f"rm {names}")
    if not segments and not dead:
        yield ok("no killed hub left shared memory or a socket")


def _hub_sockets(at: Circumstances) -> Iterator[Path]:
    """The sockets of this user's hubs, of the configured and of embedded ones too."""
    yield runtime_directory() / "hub.sock"
    for listen in at.hub.listen:
        if listen.endpoint.startswith("ipc://"):
            yield Path(listen.endpoint.removeprefix("ipc://"))
    yield from Path(tempfile.gettempdir()).glob("blendhub-????????/hub.sock")


def _is_dead(path: Path) -> bool:
    try:
        if not path.is_socket() or path.lstat().st_uid != os.getuid():
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:  # its queue is full, it is gone, or it cannot be reached
        return False
    return False
