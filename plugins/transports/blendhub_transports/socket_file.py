"""The file of a Unix socket: private, replaced if its server died, removed when its server closes."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from blendhub.core.errors import InvalidInput

BACKLOG = 128


class SocketFile:
    """A file at which this process listens. ZeroMQ accepts on ``descriptor``, and closes it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            with _locked(self._path.parent):
                _remove_if_dead(self._path)
                self.descriptor = _listen(self._path)
                self._inode = self._path.stat().st_ino
        except OSError as error:
            raise InvalidInput(
                f"no server can listen at {path}: {error.strerror}; it needs a directory that you own, "
                f"made with: mkdir -p -m 700 {self._path.parent}"
            ) from None

    def remove(self) -> None:
        """Remove the file, unless another server has taken its place."""
        with contextlib.suppress(FileNotFoundError), _locked(self._path.parent):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def why_unreachable(path: str) -> str | None:
    """Why no server answers at this socket file; None if one listens there."""
    try:
        if _listens(Path(path)):
            return None
    except OSError as error:
        return f"{path} cannot be reached ({error.strerror})"
    what = "no server listens any more at" if os.path.exists(path) else "there is no socket"
    return f"{what} {path}: is the hub running? Start it with: blendhub serve --endpoint ipc://{path}"


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue of connections is full
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep two servers from replacing the same dead file. The lock is on the directory, so it leaves no file behind."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_dead(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise InvalidInput(f"{path} exists and is not a socket; choose another endpoint or remove it")
    if not _listens(path):
        path.unlink()
        return
    raise InvalidInput(f"a server already listens at {path}; stop it or choose another endpoint")


def _listen(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        # No process can connect before listen(), so only the owner ever can.
        path.chmod(0o600)
        listener.listen(BACKLOG)
        return listener.detach()
