"""vLLM's server of the real model, alone, with BlendHub, and with LMCache, all up at the same time."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import PEER_ENVIRONMENT, peer_connector, peer_server
from harness.engines import ONE_THREAD, Server
from harness.engines.engine import transfer_config
from harness.engines.real_model import make_real_model
from harness.waiting import Closing

BLENDHUB: dict[str, Any] = {"hub": {"arena_gib": 1.0, "metrics": ""}}
"""All other settings are the defaults. By default, the arena would take a quarter of the memory."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "enable_prompt_tokens_details": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}
# Tests empty vLLM's cache by HTTP.
ENVIRONMENT = ONE_THREAD | {"VLLM_SERVER_DEV_MODE": "1"}


class Servers(Closing):
    def __init__(self, folder: Path, peer_python: str | None = None) -> None:
        """``peer_python``: an interpreter that has LMCache; None: its server is left out."""
        self.model = str(make_real_model())
        """Also the name by which clients ask for it."""
        with contextlib.ExitStack() as stack:

            def started(name: str, connector: dict[str, Any] | None, python: str = sys.executable) -> Server:
                log, environment = folder / f"{name}.log", ENVIRONMENT | (PEER_ENVIRONMENT if name == "peer" else {})
                options = OPTIONS | {"served_model_name": self.model, "environment": environment, "python": python}
                return stack.enter_context(Server(Path(self.model), log, connector, **options))

            self.plain, self.ours = self.both = [
                started("plain", None),
                started("blendhub", transfer_config(BLENDHUB)),
            ]
            self.peers: list[Server] = []
            """LMCache's, if there is one."""
            if peer_python:
                connector = peer_connector(stack.enter_context(peer_server(peer_python)))
                self.peers = [started("peer", connector, peer_python)]
            for server in (*self.both, *self.peers):
                server.wait_until_up()
            self.close = stack.pop_all().close
