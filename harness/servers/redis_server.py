"""A redis-server of this benchmark or test alone."""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from harness.waiting import Closing, wait_until

START_S = 20.0
BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "no redis-server here; install it with: apt-get install redis-server"
needs_redis = pytest.mark.skipif(BINARY is None, reason=MISSING)


class RedisServer(Closing):
    """Listens at a Unix socket. Leaves nothing when it is closed."""

    def __init__(self, *settings: str) -> None:
        if BINARY is None:
            raise FileNotFoundError(MISSING)
        self._folder = tempfile.TemporaryDirectory(prefix="blendhub-redis-")
        self._socket = Path(self._folder.name, "redis.sock")
        self.url = f"unix://{self._socket}"
        self._command = [
            *(BINARY, "--port", "0", "--unixsocket", str(self._socket), "--dir", self._folder.name),
            *("--save", "", "--appendonly", "no", *settings),
        ]
        self._process: subprocess.Popen[bytes]
        self.start()

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, START_S, every_s=0.02)

    def _answers(self) -> None:
        with suppress(redis.AuthenticationError):
            self.client().ping()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still, and answers nobody."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()
