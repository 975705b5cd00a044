"""vLLM engines in processes of their own, for tests and benchmarks of what runs inside vLLM."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATIENCE_S = 300.0
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "async_scheduling": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without a connector vLLM computes on one core of two.
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

KV = npt.NDArray[np.float32]


class Answer:
    """What an engine answered to one prompt."""

    def __init__(self, engine: "Engine", told: dict[str, Any]) -> None:
        self._engine = engine
        self.id: str = told["id"]
        self.tokens: list[int] = told["tokens"]
        self.logprobs: list[dict[int, float]] = told["logprobs"]
        """For each token, the log-probabilities of the 20 most likely ones."""
        self.told: dict[str, Any] = told["told"]
        """BlendHub's report."""
        self.first_token_s: float = told["first_token_s"]

    def kv(self, n: int) -> KV:
        """``[layers, 2, n, heads, width]`` of the prompt's first tokens; ask before other prompts need the blocks."""
        kv: KV = self._engine.call("kv", self.id, n)
        return kv


class Beside:
    """What an engine answered to one prompt while it answered another one."""

    def __init__(self, engine: "Engine", told: dict[str, Any]) -> None:
        self.answer = Answer(engine, told["answer"])
        self.stream = Answer(engine, told["stream"])
        self.longest_gap_s: float = told["longest_gap_s"]
        """Between two tokens of the other answer, after the prompt was asked."""
        self.ended_s: float = told["ended_s"]


class Engine:
    """A vLLM engine. ``blendhub`` are its settings; None for plain vLLM. ``prepare``: modules to import before vLLM."""

    def __init__(
        self,
        model: Path,
        blendhub: dict[str, Any] | None = None,
        *,
        kv_role: str = "kv_both",
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        prepare: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if blendhub is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "BlendHubConnector",
                "kv_role": kv_role,
                "kv_connector_extra_config": {"blendhub": blendhub},
            }
        self._place = tempfile.TemporaryDirectory(prefix="bh-engine-")
        self._log = Path(self._place.name) / "log"
        with Listener(f"{self._place.name}/line", "AF_UNIX") as listener, self._log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-P", str(Path(__file__).with_name("host.py")), str(listener.address), str(model)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | (environment or {}),
            )
            self._line = listener.accept()
        self._line.send((list(prepare), OPTIONS | options))
        self._answer()

    def ask(
        self,
        *prompts: Sequence[int],
        tokens: int = 1,
        abort_after: float | None = None,
        each: Sequence[dict[str, Any]] | None = None,
        **asked: Any,
    ) -> list[Answer]:
        """Ask all prompts at once; ``asked`` is what they say to BlendHub, unless ``each`` says it for each;

        ``cache_salt`` and ``lora``, an adapter's directory, go to vLLM itself.

        What was aborted before it had an answer is left out.
        """
        told = self.call("ask", list(map(list, prompts)), list(each or [asked] * len(prompts)), tokens, abort_after)
        return [Answer(self, one) for one in told if one is not None]

    def one(self, prompt: Sequence[int], tokens: int = 1, **asked: Any) -> Answer:
        """Ask one prompt."""
        return self.ask(prompt, tokens=tokens, **asked)[0]

    def beside(
        self, stream: Sequence[int], stream_tokens: int, prompt: Sequence[int], tokens: int = 1, **asked: Any
    ) -> "Beside":
        """Ask one prompt while another request decodes so many tokens."""
        return Beside(self, self.call("beside", list(stream), stream_tokens, list(prompt), asked, tokens))

    def forget(self) -> None:
        """Empty vLLM's own cache, so that only what was stored can help."""
        if not self.call("forget"):
            raise RuntimeError("blocks of vLLM are still held")

    @property
    def log(self) -> str:
        """What it has written to its output."""
        return self._log.read_text(errors="replace")

    def call(self, method: str, *arguments: Any) -> Any:
        """Another of the host's methods."""
        self._line.send((method, arguments))
        return self._answer()

    def close(self) -> float:
        """End it, and tell how many seconds vLLM took for that; raises if it ended badly."""
        try:
            seconds: float = self.call("close")
            if self.process.wait(60):
                raise RuntimeError(f"the engine ended with exit code {self.process.returncode}:\n{self.log[-3000:]}")
            return seconds
        finally:
            self.process.kill()
            self.process.wait()
            self._place.cleanup()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self) -> Any:
        if not self._line.poll(PATIENCE_S):
            raise TimeoutError(f"the engine did not answer in {PATIENCE_S:.0f} s:\n{self.log[-3000:]}")
        try:
            answer = self._line.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the engine died:\n{self.log[-8000:]}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def deviation(given: KV, expected: KV) -> float:
    """How far KV is from what it should be, relative to its size."""
    return float(np.linalg.norm(given - expected) / np.linalg.norm(expected))


def largest_difference(given: KV, expected: KV) -> float:
    """The largest difference of a number, relative to the largest number."""
    return float(np.abs(given - expected).max() / np.abs(expected).max())


def disagreement(given: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """The largest difference of a likely token's log-probability, as far as answers continue the same text.

    Tokens themselves are equal only between engines of the same kind, asked one prompt after the other: where two are
    almost equally likely, rounding decides, and the rest of the two answers cannot be compared.
    """
    return max(_disagreement(*pair) for pair in zip(given, expected, strict=True))


def _disagreement(given: Answer, expected: Answer) -> float:
    worst = 0.0
    for ours, theirs, token, other in zip(
        given.logprobs, expected.logprobs, given.tokens, expected.tokens, strict=True
    ):
        likely = {*_most_likely(ours), *_most_likely(theirs)}
        worst = max(worst, *(abs(ours.get(one, -math.inf) - theirs.get(one, -math.inf)) for one in likely))
        if token != other:
            break
    return worst


def _most_likely(logprobs: dict[int, float]) -> list[int]:
    """Half of those known: the others may be missing where rounding decides which are known."""
    return sorted(logprobs, key=logprobs.__getitem__, reverse=True)[: len(logprobs) // 2]
