"""A process with one vLLM engine that audits every prompt at every ratio: ``python -m blendhub.tools.advice.measure``.

It reads a ``Job`` from standard input, and writes a ``Part`` for every few prompts to the file descriptor that is its
argument, a line of JSON each. vLLM's own output stays apart from them.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from blendhub.tools.advice.choice import Audited
from blendhub.tools.advice.prompts import Prompts
from blendhub.tools.advice.questions import Question

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


class Part(msgspec.Struct, frozen=True):
    """The audits of some prompts at one ratio."""

    ratio: float
    prompts: int
    audits: tuple[Audited, ...]
    """The audits of those prompts in which text was moved."""


class Engine:
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

    def audits(self, ratio: float) -> Iterator[Part]:
        for at in range(0, len(self._prompts.asked), PART):
            prompts = self._prompts.asked[at : at + PART]
            reports = self._ask(prompts, {"audit": True, "recompute_ratio": ratio, "store": False})
            audited = [one for one in reports if "audit" in one]
            audits = (Audited(one["audit"]["agrees"], one["audit"]["kl"], one["moved_tokens"]) for one in audited)
            yield Part(ratio, len(prompts), tuple(audits))

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


def main(out: int) -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    engine = Engine(job)
    engine.store()
    for ratio in job.ratios:
        for part in engine.audits(ratio):
            os.write(out, msgspec.json.encode(part) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
