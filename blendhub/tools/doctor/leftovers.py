"""Finds the leftovers of killed hubs: shared memory, which nothing else frees, and sockets."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blendhub.hub.memory.arena import leftovers
from blendhub.system.default_paths import runtime_directory
from blendhub.tools.doctor.access import quoted
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, ok, warn

LEAST_AGE_S = 5.0


def leftovers_of_hubs(at: Circumstances) -> Iterator[Finding]:
    segments = [(path, path.stat().st_size) for path in leftovers(LEAST_AGE_S)]
    if segments:
        size = sum(size for _, size in segments) / 2**30
        names = " ".join(quoted(path) for path, _ in segments)
        yield warn(f"killed hubs left {size:.2f} GiB of shared memory; the next hub removes it", f"rm {names}")
    dead = [path for path in _sockets(at) if _is_dead(path)]
    if dead:
        names = " ".join(map(quoted, dead))
        yield warn(f"{len(dead)} sockets are left at which no hub listens any more: {names}", f"rm {names}")
    if not segments and not dead:
        yield ok("no killed hub left shared memory or a socket")


def _sockets(at: Circumstances) -> Iterator[Path]:
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
