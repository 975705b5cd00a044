"""vLLM's own client, ``vllm bench serve``, and what it measured."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.load.traces import PIECE_TOKENS, Load
from harness.engines import Server
from harness.engines.server import NAME

BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command runs, which itself cannot start in vLLM's builds for the CPU."""


class Measured(NamedTuple):
    """Seconds, of the requests that were answered, in their order."""

    first_token: list[float]
    per_token: list[float]
    """Between two tokens of an answer, on average; of answers that have two."""
    duration: float
    failed: int

    @property
    def rate(self) -> float:
        """Requests answered in a second."""
        return len(self.first_token) / self.duration

    def first_token_at(self, percent: float) -> float:
        return float(np.percentile(self.first_token, percent))


class Client:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._numbers = itertools.count()
        self.failed = 0
        """Requests of all measurements until now."""

    def run(
        self, server: Server, load: Load, *, rate: float = math.inf, at_once: int | None = None, **blendhub: Any
    ) -> Measured:
        """Ask all prompts: in Poisson's intervals at so many a second, or at once, at most ``at_once`` at a time.

        ``blendhub``: what the requests say to BlendHub.
        """
        result = self._folder / f"run-{next(self._numbers)}.json"
        arguments: dict[str, Any] = {
            "backend": "openai",
            "base-url": server.url,
            "endpoint": "/v1/completions",
            "model": self._model,
            "served-model-name": NAME,
            "dataset-name": "timed_trace",
            "dataset-path": load.write(result.with_suffix(".jsonl")),
            "timed-trace-chunk-hash-size": PIECE_TOKENS,
            "num-prompts": len(load.prompts),
            "request-rate": rate,
            "max-concurrency": at_once or len(load.prompts),
            "temperature": 0,
            "extra-body": json.dumps({"kv_transfer_params": {"blendhub": blendhub}}),
            # The first prompt would be asked twice otherwise.
            "ready-check-timeout-sec": 0,
            "result-dir": self._folder,
            "result-filename": result.name,
        }
        options = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        flags = ["--no-self-timed", "--disable-tqdm", "--save-result", "--save-detailed"]
        # The client makes tokens of a piece by hashing its number.
        environment = os.environ | {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        command = [sys.executable, "-c", BENCH_SERVE, *options, *flags]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"vLLM's client failed:\n{done.stdout[-5000:]}")
        measured = measured_of(json.loads(result.read_text()))
        self.failed += measured.failed
        return measured


def measured_of(result: dict[str, Any]) -> Measured:
    answered = [number for number, error in enumerate(result["errors"]) if not error]
    gaps = [result["itls"][number] for number in answered]
    return Measured(
        first_token=[result["ttfts"][number] for number in answered],
        per_token=[sum(answer) / len(answer) for answer in gaps if answer],
        duration=result["duration"],
        failed=len(result["errors"]) - len(answered),
    )
