"""Runs vLLM engines that audit every prompt at every ratio, each in a separate process.

That process, ``python -m blendhub.tools.advice.measure``, reads a ``Job`` from standard input, and writes a ``Part``
for every few prompts to the file descriptor that is its argument, a line of JSON each, apart from vLLM's own output.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from blendhub.contracts import Selection, Selector
from blendhub.core.errors import BlendHubError
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub.tools.advice.choice import PromptAudit
from blendhub.tools.advice.questions import Prompts, Question

STORED_WITHIN_S = 30.0
"""How long the last document may take to be found. Documents too short for every matcher never are."""

PART = 16
"""Prompts that are given to vLLM at a time: enough to keep it busy, few enough to see how it gets on."""


class Job(msgspec.Struct, frozen=True):
    model: str
    engine: dict[str, Any]
    """Arguments of vLLM's ``LLM``."""
    settings: dict[str, Any]
    """BlendHub's settings, with the selector."""
    selector: str
    ratios: tuple[float, ...]
    questions: list[Question]


class AuditBatch(msgspec.Struct, frozen=True):
    """The audits of some prompts at one ratio."""

    ratio: float
    prompts: int
    audits: tuple[PromptAudit, ...]
    """The audits of those prompts in which text was moved."""


class AuditedEngine:
    """vLLM with BlendHub. Documents are stored one by one, as other prompts would have left them."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        transfer = {
            "kv_connector": "BlendHubConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"blendhub": job.settings},
        }
        self._engine = LLM(job.model, kv_transfer_config=transfer, **job.engine)
        is_text = not job.engine.get("skip_tokenizer_init")
        self._prompts = Prompts(self._engine.get_tokenizer() if is_text else None, job.questions)

    def store(self) -> None:
        """Compute each document alone, and wait until the longest, which comes last, is found at another place."""
        self._ask(self._prompts.documents, {"mode": "off"})
        until = time.monotonic() + STORED_WITHIN_S
        while time.monotonic() < until:
            (report,) = self._ask([2 * self._prompts.documents[-1]], {"store": False})
            if report.get("moved_tokens"):
                break
            time.sleep(0.1)
        self._engine.reset_prefix_cache()

    def audits(self, ratio: float) -> Iterator[AuditBatch]:
        for at in range(0, len(self._prompts.asked), PART):
            prompts = self._prompts.asked[at : at + PART]
            reports = self._ask(prompts, {"audit": True, "recompute_ratio": ratio, "store": False})
            audited = [one for one in reports if "audit" in one]
            audits = (PromptAudit(one["audit"]["agrees"], one["audit"]["kl"], one["moved_tokens"]) for one in audited)
            yield AuditBatch(ratio, len(prompts), tuple(audits))

    def _ask(self, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports of prompts that all give BlendHub the same settings."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            extra_args={"kv_transfer_params": {"blendhub": asked}},
        )
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._engine.generate(given, sampling, use_tqdm=False)
        return [(answer.kv_transfer_params or {}).get("blendhub", {}) for answer in answers]


def distinct_ratios(host: PluginHost, settings: dict[str, Any], ratios: tuple[float, ...]) -> tuple[float, ...]:
    """The ratios at which the selector picks differently: one is enough if it goes by a rule without a ratio."""
    name, options = settings["selector"]["name"], settings["selector"].get("options", {})
    selector: Selector = host.create("selector", name, options)
    if "own_ratio" not in host.spec("selector", name).capabilities or selector.probe_layer:
        return ratios
    moved = [Span(0, 512), Span(512, 1024)]
    picked: dict[tuple[Span, ...], float] = {}
    for ratio in ratios:
        picked.setdefault(tuple(selector.select(Selection(moved, ratio))), ratio)
    return tuple(picked.values())


def measured_with(settings: dict[str, Any], selector: str) -> dict[str, Any]:
    """The person's settings with this selector, without limits that would refuse to blend."""
    policy = {**settings.get("policy", {}), "max_recompute_share": 1.0}
    given = settings.get("selector", {})
    chosen = given if given.get("name") == selector else {"name": selector}
    return {**settings, "selector": chosen, "policy": policy, "audit_share": 0, "hold_agreement": None, "mode": "blend"}


def run_engine(job: Job) -> Iterator[AuditBatch]:
    """Run an engine, and yield its measurements as they arrive. vLLM's output is shown only if the engine fails."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log, open(read, "rb") as lines:
        child = subprocess.Popen(
            [sys.executable, "-m", "blendhub.tools.advice.measure", str(write)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[write],
            # vLLM starts processes that would outlive this one: all of them end together.
            start_new_session=True,
        )
        os.close(write)
        try:
            assert child.stdin
            with child.stdin as given:
                given.write(msgspec.json.encode(job))
            yield from (msgspec.json.decode(line, type=AuditBatch) for line in lines)
            code = child.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if code:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise BlendHubError(
                f"vLLM failed with the selector {job.selector} (exit code {code}), see above; --engine sets arguments"
            )


def main(out: int) -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    engine = AuditedEngine(job)
    engine.store()
    for ratio in job.ratios:
        for part in engine.audits(ratio):
            os.write(out, msgspec.json.encode(part) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
