"""vLLM's own client, ``vllm bench serve``, and what it measured.

Its prompts are of documents that were seen before, as traces: lists of pieces that the client makes tokens of.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.engines import Server
from harness.engines.server import NAME

PIECE_TOKENS = 20
DOCUMENTS = 14
Prompt = list[int]
"""The numbers of a prompt's pieces. A number stands for the same tokens in every trace."""
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command runs, which itself cannot start in vLLM's builds for the CPU."""


class Load(NamedTuple):
    prompts: list[Prompt]
    answer_tokens: int

    def write(self, path: Path) -> Path:
        with path.open("w") as file:
            for prompt in self.prompts:
                lengths = {"input_length": PIECE_TOKENS * len(prompt), "output_length": self.answer_tokens}
                file.write(json.dumps({"timestamp": 0, **lengths, "hash_ids": prompt}) + "\n")
        return path


class Traces:
    """Documents that prompts repeat, and new text."""

    def __init__(self, document_tokens: int) -> None:
        self._random, self._next = np.random.default_rng(0), 0
        self.documents = [self._new(document_tokens) for _ in range(DOCUMENTS)]

    def _new(self, n_tokens: int) -> Prompt:
        """Text of about so many tokens, at least a piece."""
        first = self._next
        self._next += max(1, n_tokens // PIECE_TOKENS)
        return list(range(first, self._next))

    def alone(self) -> Load:
        """Each document as a prompt, which has it stored."""
        return Load(self.documents, 1)

    def moved(self, n_prompts: int, n_documents: int, answer_tokens: int) -> Load:
        """Documents in new orders behind a novel beginning, which keeps the first from being an exact prefix, and
        before a novel question."""
        prompts = []
        for _ in range(n_prompts):
            chosen = self._random.permutation(DOCUMENTS)[:n_documents]
            pieces = [piece for number in chosen for piece in self.documents[number]]
            prompts.append([*self._new(PIECE_TOKENS), *pieces, *self._new(PIECE_TOKENS)])
        return Load(prompts, answer_tokens)


class Measured(NamedTuple):
    """Seconds, of the requests that were answered, in their order."""

    first_token: list[float]
    per_token: list[float]
    """Between two tokens of an answer, on average; of answers that have two."""
    duration: float

    @property
    def rate(self) -> float:
        """Requests answered in a second."""
        return len(self.first_token) / self.duration


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
        told = json.loads(result.read_text())
        answered = [number for number, error in enumerate(told["errors"]) if not error]
        self.failed += len(told["errors"]) - len(answered)
        gaps = [told["itls"][number] for number in answered]
        return Measured(
            first_token=[told["ttfts"][number] for number in answered],
            per_token=[sum(answer) / len(answer) for answer in gaps if answer],
            duration=told["duration"],
        )
