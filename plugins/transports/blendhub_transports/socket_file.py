"""The file of a Unix socket: private, replaced if its server died, removed when its server closes."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from blendhub.core.errors import BlendHubError, Busy, InvalidInput, PeerGone

BACKLOG = 128


class SocketFile:
    """A file at which this process listens, by ``socket``."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            with _locked(self._path.parent):
                _remove_if_dead(self._path)
                self.socket = _listen(self._path)
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


def why_unreachable(path: str, endpoint: str) -> BlendHubError | None:
    """Why no connection to an endpoint's server, at a file, is possible now; None if one is."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return Busy(f"the server at {path} accepts no connection now; is it overloaded?")
        except (ConnectionRefusedError, FileNotFoundError) as error:
            what = "there is no socket" if isinstance(error, FileNotFoundError) else "no server listens any more at"
            return PeerGone(f"{what} {path}: is the hub running? Start it with: blendhub serve --endpoint {endpoint}")
        except OSError as error:
            return PeerGone(f"{path} cannot be reached ({error.strerror})")
    return None


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
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return path.unlink()
        except BlockingIOError:  # its queue of connections is full
            pass
    raise InvalidInput(f"a server already listens at {path}; stop it or choose another endpoint")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        # No process can connect before listen(), so only the owner ever can.
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
