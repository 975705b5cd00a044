"""Hubs and engines in separate processes, which tests may kill."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SOON_S = 20.0

HUB = """
import asyncio, sys
from blendhub.hub.config import HubConfig, Listen, StoreChoice
from blendhub.hub.hub import Hub

endpoint, store = sys.argv[1:3]
config = HubConfig(
    arena_gib=float(sys.argv[3]),
    silence_s=float(sys.argv[4]),
    listen=(Listen(endpoint=endpoint),),
    store=StoreChoice(options={"path": store, "capacity_gib": 0.05}) if store else None,
    metrics="",
)

async def serve():
    async with Hub(config):
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(serve())
"""


class HubProcess:
    """A hub that can be killed and started again at the same endpoint."""

    def __init__(
        self,
        folder: Path,
        *,
        arena_gib: float = 0.01,
        store: Path | None = None,
        silence_s: float = 15.0,
        within: Sequence[str] = (),
    ) -> None:
        """``within`` is a command that runs the hub's, such as one that gives it another ``/dev/shm``."""
        self._within = within
        self.endpoint = f"ipc://{folder}/hub.sock"
        self._arguments = [self.endpoint, str(store or ""), str(arena_gib), str(silence_s)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self._within, sys.executable, "-c", HUB, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout and self.process.stdout.readline() == "up\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


IN_A_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A new pid namespace with the machine's shared memory, as with ``--ipc=host``."""

IN_A_PLACE = ("unshare", "--mount", "bash", "-c", 'mount -t tmpfs -o "$0" tmpfs /dev/shm && exec "$@"')
"""With shared memory for itself, mounted with the options that follow."""


def run_python(code: str, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Run Python code that can import the tests' modules."""
    return subprocess.Popen(
        [*within, sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def python_of(process: subprocess.Popen) -> int:
    """The pid, as seen from here, of the interpreter that ``run_python`` started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    arguments: Any = process.args
    return int(children[0]) if arguments[0] == IN_A_CONTAINER[0] else process.pid


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {SOON_S} s"
        time.sleep(0.01)
