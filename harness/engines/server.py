"""vLLM's server with the OpenAI interface."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.engines.engine import ENVIRONMENT
from harness.waiting import Closing, free_port

NAME = "tiny"
PATIENCE_S = 1200
START = """
import multiprocessing, runpy, sys
from vllm.utils import system_utils
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
sys.argv[0] = "vllm"
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
"""vLLM forks an engine's processes on GPUs. On CPUs each would be spawned, and import all of vLLM. With another
interpreter they are: vLLM 0.32 fails in a worker that is forked when LMCache has imported numba.
"""


class Server(Closing):
    """A server in a separate session, so that all of its processes can be examined and ended."""

    def __init__(
        self,
        model: Path,
        log: Path,
        connector: dict[str, Any] | None = None,
        *,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        **options: int | str | bool,
    ) -> None:
        """``connector``: vLLM's ``kv_transfer_config``; None: vLLM with its prefix cache alone.

        ``options``: those of the command line, with underscores; True for one that takes no value.
        """
        self.name = str(options.get("served_model_name", NAME))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given: dict[str, int | str | bool] = {"model": str(model), "served-model-name": self.name, "dtype": "float32"}
        given |= {"host": "127.0.0.1", "port": self.port, "block-size": 32}
        given |= {name.replace("_", "-"): value for name, value in options.items()}
        if connector:
            given["kv-transfer-config"] = json.dumps(connector)
        arguments: list[str] = []
        for name, value in given.items():
            arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        # The engine is in a separate process, as it is by default.
        usual = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
        start = ["-c", START] if python == sys.executable else ["-m", "vllm.entrypoints.openai.api_server"]
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [python, "-P", *start, "--enforce-eager", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | usual | (environment or {}),
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        import httpx  # engines that are no servers run where it is not installed

        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/health", timeout=10).raise_for_status()
                return
            time.sleep(0.2)
        raise RuntimeError(f"vLLM's server did not start:\n{self.log[-5000:]}")

    @property
    def log(self) -> str:
        """The server's output so far."""
        return self._log.read_text(errors="replace")

    def processes(self) -> Iterator[int]:
        """The pids of all of its processes."""
        for pid in (int(place.name) for place in Path("/proc").glob("[0-9]*")):
            with suppress(ProcessLookupError):
                if os.getsid(pid) == self.process.pid:
                    yield pid

    def close(self) -> None:
        """End it, in the end with force; killed at once, its processes would leave vLLM's shared memory."""
        self.process.terminate()
        until = time.monotonic() + 30
        with suppress(ProcessLookupError):  # none of its processes is left
            while time.monotonic() < until:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
