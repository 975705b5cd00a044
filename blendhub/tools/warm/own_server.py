"""vLLM's server, started for one corpus and ended behind it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from blendhub.core.errors import BlendHubError

MODULE = "vllm.entrypoints.openai.api_server"
ENDS_WITHIN_S = 120.0
"""The hub inside it first saves to its store what waits."""
PAUSE_S = 0.5
SHOWN_OF_LOG = 2000


class OwnServer:
    """A server on this machine that only this process asks."""

    def __init__(self, model: str, engine: Mapping[str, Any], transfer: Mapping[str, Any]) -> None:
        """``engine``: vLLM's arguments, with underscores. ``transfer``: the value of ``--kv-transfer-config``."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        given = {**engine, "model": model, "host": "127.0.0.1", "port": port, "kv_transfer_config": transfer}
        arguments = [part for name, value in given.items() for part in _argument(name, value)]
        self._log = tempfile.NamedTemporaryFile("w", prefix="blendhub-warm-", suffix=".log")  # noqa: SIM115
        # In a session apart: Ctrl-C is for the command, which ends the server when all is saved.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_up(self, stop: threading.Event) -> None:
        """Wait until it serves, or until ``stop``; raises BlendHubError with the end of its log if it ends instead."""
        while self._process.poll() is None and not stop.is_set():
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(PAUSE_S)
        if not stop.is_set():
            said = Path(self._log.name).read_text(errors="replace")[-SHOWN_OF_LOG:]
            raise BlendHubError(f"vLLM's server did not start; the end of its log:\n{said}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._process.terminate()
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            self._log.close()


def _argument(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag[2:]}"]
    return [flag, value if isinstance(value, str) else json.dumps(value)]
