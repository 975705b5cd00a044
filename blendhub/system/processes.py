"""Identity of a process, and the priority of a thread. A pid alone identifies no process: the kernel reuses pids."""

import functools
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


class ProcessId(msgspec.Struct, frozen=True):
    """A process on some machine."""

    host: Annotated[str, Meta(max_length=1024)]
    """The machine's boot id and the pid namespace, within which pids are unique."""
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    started: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """The start time of the process, in the kernel's ticks."""

    @classmethod
    def mine(cls) -> "ProcessId":
        return cls(this_host(), os.getpid(), _started(os.getpid()) or 0)

    def is_here(self) -> bool:
        return self.host == this_host()

    def is_alive(self) -> bool:
        """Whether the process still runs; only for processes of this machine."""
        return _started(self.pid) == self.started


def this_host() -> str:
    return f"{_boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}"


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(pid: int) -> int | None:
    try:
        # Not by a Path, which would intern each new pid: a hub asks this for as long as it runs.
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            facts = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything; what follows it starts with the state, field 3 of the page.
    fields = facts.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module in another process of this interpreter, not from the current directory."""
    return [sys.executable, "-P", "-m", name, *arguments]


def importing_the_same() -> dict[str, str]:
    """The environment of a child process that can import what this one can: plugins among it."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def let_others_run_first(niceness: int) -> None:
    """Give the calling thread less of a busy machine's cores, where the system allows that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
