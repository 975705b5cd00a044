"""A vLLM engine in a separate process."""

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from harness.engines.answers import KV, Answer, Beside
from harness.engines.interpreter import answer, interpreter
from harness.waiting import Closing

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
    "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    # Without a connector vLLM computes on one core of two, unless it is bound.
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0-1"),
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Variables of an engine whose steps are timed: threads that compute together wait for each other, and for what else
the machine does."""


def transfer_config(blendhub: Mapping[str, Any], kv_role: str = "kv_both") -> dict[str, Any]:
    """vLLM's option with which an engine has BlendHub, with these settings."""
    return {
        "kv_connector": "BlendHubConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"blendhub": blendhub},
    }


class Engine(Closing):
    """A vLLM engine. ``blendhub`` are its settings; None for plain vLLM."""

    def __init__(
        self,
        model: Path | str,
        blendhub: dict[str, Any] | None = None,
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        prepare: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        arrange: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """``environment``: variables that the interpreter has before it imports vLLM. ``prepare``: modules to import
        before vLLM, for all engines of one interpreter.

        ``variables``: of this engine's process, set after these imports: engines that differ only in them share an
        interpreter. ``arrange``: a function as ``module:function``, and its arguments, to call in this engine's process
        before vLLM makes the engine.

        ``options`` are vLLM's; one that is None is left to vLLM, or to its platform.
        """
        if blendhub is not None:
            options["kv_transfer_config"] = transfer_config(blendhub)
        self._interpreter = interpreter(python, ENVIRONMENT | (environment or {}), prepare)
        self._place = tempfile.TemporaryDirectory(prefix="bh-engine-")
        self._log = Path(self._place.name) / "log"
        with Listener(f"{self._place.name}/line", "AF_UNIX") as listener:
            self.pid = self._interpreter.fork(self._log, str(listener.address))
            self._line = listener.accept()
        given = {name: value for name, value in (OPTIONS | options).items() if value is not None}
        self._line.send((dict(variables or {}), list(arrange), str(model), given))
        answer(self._line, self._log)

    def ask(
        self,
        *prompts: Sequence[int],
        tokens: int = 1,
        abort_after: float | None = None,
        each: Sequence[dict[str, Any]] | None = None,
        keep_kv: bool = False,
        **asked: Any,
    ) -> list[Answer]:
        """Ask all prompts at once. ``asked`` is what they say to BlendHub; ``each`` has it for each prompt by itself.

        Some of it goes to vLLM itself: ``cache_salt``; ``lora``, an adapter's directory, or its name and directory;
        ``stop_token_ids``, each of which ends an answer; the number of ``logprobs``; ``sampling``, other parameters;
        and ``forced``, tokens for a logits processor. ``transfer`` is what the prompts say to other connectors.

        What was aborted before it had an answer is left out. With ``keep_kv`` the KV of each prompt is copied when the
        request ends: vLLM may give its blocks to the other prompts.
        """
        said = list(each or [asked] * len(prompts))
        answers = self.call("ask", list(map(list, prompts)), said, tokens, abort_after, keep_kv)
        return [Answer(self.call, one) for one in answers if one is not None]

    def one(self, prompt: Sequence[int], tokens: int = 1, **asked: Any) -> Answer:
        """Ask one prompt."""
        return self.ask(prompt, tokens=tokens, **asked)[0]

    def beside(
        self,
        decoding: Sequence[Sequence[int]],
        decoded: int | None,
        prompt: Sequence[int],
        tokens: int = 1,
        **asked: Any,
    ) -> Beside:
        """Ask one prompt while others decode so many tokens, or until it is answered."""
        answer, stream, gaps_s = self.call("beside", list(map(list, decoding)), decoded, list(prompt), asked, tokens)
        return Beside(Answer(self.call, answer), Answer(self.call, stream) if stream else None, gaps_s)

    def forget(self) -> None:
        """Empty vLLM's own cache, so that only stored KV can help."""
        if not self.call("forget"):
            raise RuntimeError("blocks of vLLM are still held")

    def full_prefill(self, prompt: Sequence[int]) -> KV:
        """The KV of a prompt's tokens but the last, computed without reuse; vLLM's own cache is empty after it."""
        computed = self.one(prompt, mode="off", store=False).kv(len(prompt) - 1)
        self.forget()
        return computed

    @property
    def log(self) -> str:
        """The engine's output so far."""
        return self._log.read_text(errors="replace")

    def call(self, method: str, *arguments: Any) -> Any:
        """Another of the host's methods."""
        self._line.send((method, arguments))
        return answer(self._line, self._log)

    def close(self) -> float:
        """End it, and tell how many seconds vLLM took for that; raises if it ended badly."""
        try:
            seconds: float = self.call("close")
            code = self._interpreter.exit_code(self.pid, 60)
            if code:
                raise RuntimeError(f"the engine ended with exit code {code}:\n{self.log[-3000:]}")
            return seconds
        finally:
            # The pid is free for others only after the interpreter waited for it.
            if self._interpreter.exit_code(self.pid, 0) is None:
                os.kill(self.pid, signal.SIGKILL)
                self._interpreter.exit_code(self.pid, 60)
            self._place.cleanup()
