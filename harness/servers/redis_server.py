"""A redis-server of this benchmark or test alone."""

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis

from harness.ports import free_port
from harness.servers.network import THIS, Machine

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
            *("--save", "", "--appendonly", "yes" if keeps else "no", "--logfile", str(Path(self._folder.name, "log"))),
            *(*network, *settings),
        )
        self._process: subprocess.Popen[bytes]
        self.start()

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(f"unix://{self._socket}", socket_timeout=5)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.client().ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    log = Path(self._folder.name, "log")
                    raise TimeoutError(f"redis-server does not answer: {log.read_text()[-500:]}") from None
                time.sleep(0.02)

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
