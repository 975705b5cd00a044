"""A redis-server of this benchmark or test alone."""

import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from harness.servers.network import THIS, Machine
from harness.waiting import free_port, wait_until

START_S = 20.0
BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "no redis-server here; install it with: apt-get install redis-server"
needs_redis = pytest.mark.skipif(BINARY is None, reason=MISSING)


class RedisServer:
    """Listens at a Unix socket, and on a machine's network if one is given. Leaves nothing when it is closed."""

    def __init__(self, *settings: str, keeps: bool = False, machine: Machine | None = None) -> None:
        """``keeps``: with its append-only file, so that it remembers after a restart."""
        if BINARY is None:
            raise FileNotFoundError(MISSING)
        self._folder = tempfile.TemporaryDirectory(prefix="blendhub-redis-")
        self._socket = Path(self._folder.name, "redis.sock")
        port = free_port() if machine else 0
        self.url = f"redis://{machine.address}:{port}" if machine else f"unix://{self._socket}"
        network = ["--bind", machine.address, "--protected-mode", "no"] if machine else []
        self._command = (machine or THIS).command(
            *(BINARY, "--port", str(port), "--unixsocket", str(self._socket), "--dir", self._folder.name),
            *("--save", "", "--appendonly", "yes" if keeps else "no"),
            *(*network, *settings),
        )
        self._process: subprocess.Popen[bytes]
        self.start()

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(f"unix://{self._socket}", socket_timeout=5)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, START_S, every_s=0.02)

    def _answers(self) -> None:
        with suppress(redis.AuthenticationError):
            self.client().ping()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
