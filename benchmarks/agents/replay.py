"""Has servers answer a script's steps: BlendHub beside vLLM with its prefix cache, edited prompts also from nothing."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agents.client import LOGPROBS, Client, Reply
from benchmarks.agents.scripts import Step
from benchmarks.timing import progress
from harness.engines.engine import transfer_config
from harness.engines.server import NAME, Server
from harness.engines.tiny_model import TIMED, make_tiny_model

OPTIONS: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "max_logprobs": LOGPROBS,
    "enable_prompt_tokens_details": True,
}
# An audited request is answered from exact KV.
SETTINGS = {"hub": {"arena_gib": 3.0, "metrics": ""}, "audit_share": 0.0}
IDLE_S = 1.1
"""After a step, vLLM's worker keeps a core busy for a second while it waits for the next one."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class Asked(NamedTuple):
    """One step's answers."""

    step: Step
    cached: Reply
    """By vLLM with its prefix cache."""
    ours: Reply
    full: Reply | None
    """By vLLM from nothing, of edited steps."""


class Servers:
    """A server with BlendHub, and one without."""

    def __init__(self, plain: Client, blending: Client, pause_s: float) -> None:
        self._plain = plain
        self._blending = blending
        self._pause_s = pause_s
        self._salts = count()

    def replay(self, steps: Sequence[Step], said: str, tokens: int = 1) -> list[Asked]:
        """No step finds what another script has left."""
        salt, asked = f"{said} {next(self._salts)}", []
        for step in progress(steps, said):
            cached = self._ask(self._plain, step, salt, tokens)
            ours = self._ask(self._blending, step, salt, tokens)
            full = self._ask(self._plain, step, f"alone {next(self._salts)}", tokens) if step.is_edited else None
            asked.append(Asked(step, cached, ours, full))
        return asked

    def _ask(self, server: Client, step: Step, salt: str, tokens: int) -> Reply:
        time.sleep(self._pause_s)
        return server.ask(step.messages, salt, tokens)


@contextmanager
def serving(model: Path, pause_s: float = 0.0) -> Iterator[Servers]:
    """``pause_s``: before each request, so that the server that was asked before does not compute any more."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendhub-agents-")))
        servers = [
            stack.enter_context(Server(model, place / name, given, **OPTIONS))
            for name, given in (("plain.log", None), ("blending.log", transfer_config(SETTINGS)))
        ]
        for server in servers:
            server.wait_until_up()
        plain, blending = (Client(server.port, NAME) for server in servers)
        yield Servers(plain, blending, pause_s)


def model_for_times(real: Path, place: Path) -> Path:
    """Random weights of the shape of ``benchmarks.ttft``, with the real model's tokenizer and chat template."""
    made = make_tiny_model(place, **TIMED, vocab_size=49_152, max_position_embeddings=8192)
    for name in TOKENIZER:
        if (real / name).exists():
            shutil.copy(real / name, made)
    return made
