"""vLLM's server of the real model, alone and with BlendHub, both up at the same time."""

import contextlib
from pathlib import Path
from typing import Any

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
    def __init__(self, folder: Path) -> None:
        self.model = str(make_real_model())
        """Also the name by which clients ask for it."""
        with contextlib.ExitStack() as stack:
            self.plain, self.ours = self.both = [
                stack.enter_context(
                    Server(
                        Path(self.model),
                        folder / f"{name}.log",
                        connector,
                        served_model_name=self.model,
                        environment=ENVIRONMENT,
                        **OPTIONS,
                    )
                )
                for name, connector in (("plain", None), ("blendhub", transfer_config(BLENDHUB)))
            ]
            for server in self.both:
                server.wait_until_up()
            self.close = stack.pop_all().close
