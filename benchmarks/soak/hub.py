"""The soak's hub: always short of memory and of disk, and checking its own integrity all the time."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

from benchmarks.memory import own_bytes
from blendhub.hub.config import HubConfig, Listen, StoreChoice
from blendhub.hub.hub import Hub
from blendhub.hub.process_tuning import tune_process
from harness.servers.verifying_client import SMALL

_processes = multiprocessing.get_context("spawn")
START_S = 120.0


class HubProcess:
    """A hub that can be frozen, killed, and started again at the same endpoint with the same store."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/hub.sock"
        self._store = str(folder / "store")
        self.failures = 0
        self.start()

    def start(self) -> None:
        ready = _processes.Event()
        self._process = _processes.Process(target=serve, args=(self.endpoint, self._store, ready))
        self._process.start()
        if not ready.wait(START_S):
            raise SystemExit("the hub did not start")

    def signal(self, number: int) -> None:
        self.failures += not self._process.is_alive()
        os.kill(self._process.pid or 0, number)

    def restart(self) -> None:
        """Restart the hub, as after a crash."""
        self.signal(signal.SIGKILL)
        self._process.join()
        self.start()

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        self._process.join(30)
        self.failures += self._process.exitcode != 0

    def own_bytes(self) -> int:
        """The memory that the hub itself takes, without the arena."""
        assert self._process.pid
        return own_bytes(self._process.pid)


def serve(endpoint: str, store: str, ready: Any) -> None:
    tune_process()
    config = HubConfig(
        arena_gib=600 * SMALL.slot_bytes / 2**30,
        listen=(Listen(endpoint=endpoint),),
        store=StoreChoice(options={"path": store, "capacity_gib": 900 * SMALL.slot_bytes / 2**30}),
        write_lease_s=2.0,
        read_lease_s=5.0,
        silence_s=5.0,
        metrics="",
    )

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with Hub(config) as hub:
            ready.set()
            while not stopped.is_set():
                hub.service.state.check_integrity()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stopped.wait(), 1.0)

    asyncio.run(run())
