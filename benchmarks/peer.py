"""The server of the peer, and how vLLM reaches it: for engines of the peer's interpreter, with its connector."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from harness.waiting import free_port

PEER_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


def peer_connector(port: int) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config``."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }


@contextlib.contextmanager
def peer_server(python: str) -> Iterator[int]:
    """Gives the server's port."""
    server = subprocess.Popen(
        [python, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port := free_port()),
         "--l1-size-gb", "2", "--chunk-size", "256", "--eviction-policy", "LRU", "--disable-observability",
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
