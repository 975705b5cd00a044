"""Hubs and engines in separate processes, which tests may kill, and what clients store and find there."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blendhub.client.hub_client import HubClient
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig, Listen, as_toml
from harness.waiting import wait_until
from tests.hub.hub_direct import marks

SOON_S = 20.0


class HubProcess:
    """A hub of ``blendhub serve`` that can be killed and started again at the same endpoint."""

    def __init__(self, folder: Path, *, within: Sequence[str] = (), arena_gib: float = 0.01, **options: Any) -> None:
        """``within`` is a command that runs the hub's, such as one that gives it another ``/dev/shm``. ``options`` are
        those of its configuration."""
        self._within = within
        self.endpoint = f"ipc://{folder}/hub.sock"
        listen = (Listen(endpoint=self.endpoint),)
        self._config = folder / "hub.toml"
        self._config.write_text(as_toml(HubConfig(listen=listen, arena_gib=arena_gib, metrics="", **options)))
        self.start()

    def start(self) -> None:
        serve = "import sys; from blendhub.cli import main; sys.exit(main(['serve', '--config', *sys.argv[1:]]))"
        self.process = run_python(serve, str(self._config), within=self._within)
        assert self.process.stdout
        assert any("--kv-transfer-config" in line for line in self.process.stdout), "the hub did not start"

    def stop(self) -> None:
        """Have it end, and save what waits."""
        self.process.terminate()
        self.process.wait()

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
        [*within, sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def python_of(process: subprocess.Popen) -> int:
    """The pid, as seen from here, of the interpreter that ``run_python`` started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    arguments: Any = process.args
    return int(children[0]) if arguments[0] == IN_A_CONTAINER[0] else process.pid


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    wait_until(condition, SOON_S, 0.01)


def store(client: HubClient, text: np.ndarray, **about: Any) -> None:
    """Store a text, with bytes of its own in place of KV."""
    reserved = client.reserve(text, Span(0, len(text)), **about).result()
    if reserved.right is None:
        return
    with client.writing(reserved.right):
        for slot in reserved.slots:
            client.shard(slot.slot)[: 4 * len(slot.span)] = marks(text, slot.span, 0)
    client.commit(reserved.right, reserved.span.end).result()


def check(client: HubClient, text: np.ndarray, wait_s: float = 0.0) -> int:
    """Look up a text, check the bytes that are found, and return the number of tokens."""
    copies = []
    with client.reading(client.lookup(text, wait_s=wait_s).result()) as pieces:
        for piece in pieces:
            rows = client.shard(piece.shard)[4 * piece.row : 4 * (piece.row + len(piece.span))]
            copies.append((piece.span, rows.copy()))
    for span, rows in copies:
        assert np.array_equal(rows, marks(text, span, 0))
    return sum(len(span) for span, _ in copies)
