"""vLLM's server with the OpenAI interface, as a person starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine_harness import ENVIRONMENT

NAME = "tiny"
PATIENCE_S = 1200


class Server:
    """In a session of its own, so that all of its processes can be looked at, and ended."""

    def __init__(
        self,
        model: Path,
        log: Path,
        connector: dict[str, Any] | None = None,
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        **options: int | str,
    ) -> None:
        """``connector``: vLLM's ``kv_transfer_config``; None: vLLM with its prefix cache alone."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        given = {"model": str(model), "served-model-name": NAME, "host": "127.0.0.1", "port": self.port}
        given |= {"dtype": "float32", "block-size": 32}
        given |= {name.replace("_", "-"): value for name, value in options.items()}
        if connector:
            given["kv-transfer-config"] = json.dumps(connector)
        arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        # The engine is in a process of its own, as it is by default.
        usual = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | usual | (environment or {}),
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10)
                return
            time.sleep(0.2)
        raise SystemExit(f"a server did not start:\n{self._log.read_text(errors='replace')[-5000:]}")

    def own_memory(self) -> int:
        """Bytes of all of its processes; what several map together, as the arena, is left out."""
        return sum(_own_memory(status) for status in Path("/proc").glob("[0-9]*/status") if self._is_mine(status))

    def _is_mine(self, status: Path) -> bool:
        try:
            return os.getsid(int(status.parent.name)) == self._process.pid
        except ProcessLookupError:
            return False

    def close(self) -> None:
        """End it, in the end with force."""
        self._process.terminate()
        until = time.monotonic() + 30
        with suppress(ProcessLookupError):  # none of its processes is left
            while time.monotonic() < until:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.1)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _own_memory(status: Path) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0  # it has ended
