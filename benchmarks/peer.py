"""Talks to the peer, which works in its own interpreter; only one side works at a time."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEER_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


class PeerProcess:
    """A script of this directory, run by the peer's interpreter; commands go as lines of JSON."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )

    def __call__(self, command: str, *given: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([command, *given]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the peer's process ended; its messages stand above")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def peer_connector(port: int) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for the peer."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }


@contextlib.contextmanager
def peer_server(python: str) -> Iterator[int]:
    """The peer's server, for engines with its connector; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [python, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port), "--l1-size-gb",
         "2", "--chunk-size", "256", "--eviction-policy", "LRU", "--disable-observability",
         "--supported-transfer-mode", "auto", "--shm-name", f"peer-{secrets.token_hex(6)}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | PEER_ENVIRONMENT,
    )  # fmt: skip
    try:
        time.sleep(20)
        if server.poll() is not None:
            sys.exit("the peer's server did not start")
        yield port
    finally:
        server.terminate()
        server.wait(30)
