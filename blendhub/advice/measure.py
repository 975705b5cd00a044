"""A process with one vLLM engine that audits every prompt at every ratio: ``python -m blendhub.advice.measure``.

It reads a ``Job`` from standard input, and writes a ``Measured`` for each ratio to the file descriptor that is its
argument, a line of JSON each. vLLM's own output stays apart from them.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from blendhub.advice.choice import Audited, Measured
from blendhub.advice.questions import Question, Text

STORED_WITHIN_S = 30.0
"""How long the last document may take to be found. Documents too short for every matcher never are."""


class Job(msgspec.Struct, frozen=True):
    model: str
    engine: dict[str, Any]
    """Arguments of vLLM's ``LLM``."""
    settings: dict[str, Any]
    """BlendHub's settings, with the selector."""
    selector: str
    ratios: tuple[float, ...]
    questions: list[Question]


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
        self._start = self._begin_of_prompt(job)
        self._prompts = [
            [*self._start, *(token for text in (*one.documents, one.question) for token in self._tokens(text))]
            for one in job.questions
        ]
        documents = {tuple(self._tokens(text)): None for one in job.questions for text in one.documents}
        self._documents = [[*self._start, *document] for document in sorted(documents, key=len) if document]

    def store(self) -> None:
        """Compute each document alone, and wait until the longest, which comes last, is found at another place."""
        self._ask(self._documents, {"mode": "off"})
        until = time.monotonic() + STORED_WITHIN_S
        while time.monotonic() < until:
            (report,) = self._ask([[*self._documents[-1], *self._documents[-1]]], {"store": False})
            if report.get("moved_tokens"):
                break
            time.sleep(0.1)
        self._engine.reset_prefix_cache()

    def audits(self, ratio: float) -> list[Audited]:
        reports = self._ask(self._prompts, {"audit": True, "recompute_ratio": ratio, "store": False})
        return [
            Audited(report["audit"]["agrees"], report["audit"]["kl"], report["moved_tokens"])
            for report in reports
            if "audit" in report
        ]

    def _ask(self, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports of prompts that all ask the same of BlendHub."""
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

    def _begin_of_prompt(self, job: Job) -> list[int]:
        """The token that the tokenizer puts before every text, if it does."""
        if all(isinstance(text, list) for one in job.questions for text in (*one.documents, one.question)):
            return []
        tokenizer: Any = self._engine.get_tokenizer()
        first = getattr(tokenizer, "bos_token_id", None)
        return [first] if first is not None and first in tokenizer.encode("a") else []

    def _tokens(self, text: Text) -> list[int]:
        if not isinstance(text, str):
            return text
        tokenizer: Any = self._engine.get_tokenizer()
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens


def main(out: int) -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    engine = Engine(job)
    engine.store()
    for ratio in job.ratios:
        measured = Measured(job.selector, ratio, tuple(engine.audits(ratio)))
        os.write(out, msgspec.json.encode(measured) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
