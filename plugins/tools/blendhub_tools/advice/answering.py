"""vLLM, asked the questions of a file: in full first, and then with reuse, made to say what full prefill said."""

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.outcome.reasons import Why
from blendhub.system.served_vllm import transfer_config
from blendhub_tools.advice.judge import LOGPROBS, judge
from blendhub_tools.advice.outcomes import Outcome
from blendhub_tools.advice.questions import Prompts, Question

STORED_WITHIN_S = 30.0
"""How long the last document may take to be found. Documents too short for every matcher never are."""

PART = 16
"""Prompts that are given to vLLM at a time: enough to keep it busy, few enough to see how it gets on."""

TIMED = 8
"""Prompts that are asked once more, one by one, for the time to their first token."""

FULL = {"mode": "off", "store": False}


class Job(msgspec.Struct, frozen=True):
    model: str
    engine: dict[str, Any]
    """Arguments of vLLM's ``LLM``."""
    settings: dict[str, Any]
    """BlendHub's settings, with the selector."""
    selector: str
    ratios: tuple[float, ...]
    questions: list[Question]
    tokens: int
    """Most tokens of an answer."""


class Served(msgspec.Struct, frozen=True, tag=True):
    """How vLLM serves the model."""

    dtype: str
    device: str
    vllm: str
    """The version."""
    has_template: bool
    prompt_tokens: int
    """The median of the prompts."""
    unmoved: str
    """Why stored text could not be moved; empty if it was."""


class Part(msgspec.Struct, frozen=True, tag=True):
    """So many prompts more are asked; with the last of a ratio comes the outcome of all."""

    prompts: int
    outcome: Outcome | None = None


class Answer(msgspec.Struct, frozen=True):
    tokens: list[int]
    logprobs: list[dict[int, float]]
    report: dict[str, Any]


class Engine:
    """vLLM with BlendHub. Documents are computed among others, as prompts leave them in a service after a while."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        from blendhub_tools.advice import forced

        # Answers are compared whether reuse pays on this machine or not.
        policy = {"min_reused_tokens": 64, "moves_states": True} | job.settings.get("policy", {})
        transfer = transfer_config(job.settings | {"policy": policy})
        self._llm = LLM(job.model, kv_transfer_config=transfer, **(job.engine | forced.OPTIONS))
        self._job = job
        self._tokenizer = None if job.engine.get("skip_tokenizer_init") else self._llm.get_tokenizer()
        self._prompts = Prompts(self._tokenizer, job.questions)
        self._n_logprobs = min(LOGPROBS, self._llm.model_config.get_vocab_size())
        self._full: list[Answer] = []
        self._unmoved = ""
        self._times_computed = 0.0

    @property
    def served(self) -> Served:
        from vllm import __version__
        from vllm.platforms import current_platform

        return Served(
            dtype=str(self._llm.model_config.dtype).removeprefix("torch."),
            device=current_platform.get_device_name(),
            vllm=__version__,
            has_template=self._prompts.has_template,
            prompt_tokens=round(statistics.median(map(len, self._prompts.asked))),
            unmoved=self._unmoved,
        )

    def store(self) -> None:
        """Compute each document behind others, and wait until the longest is found at another place."""
        context = self._job.settings.get("policy", {}).get("min_donor_context", MIN_DONOR_CONTEXT)
        documents = self._prompts.documents
        # In models with recurrent layers, text moves that was computed behind two other texts.
        for order in range(2):
            visits = [*self._prompts.visits(context, order)]
            self._times_computed += sum(map(len, visits)) / sum(map(len, documents))
            self._first_tokens(visits, {} if order else {"mode": "off"})
            until = time.monotonic() + STORED_WITHIN_S
            while time.monotonic() < until:
                (report,) = self._first_tokens([2 * documents[-1]], {"store": False})
                if report.get("moved_tokens"):
                    self._unmoved = ""
                    return
                self._unmoved = report.get("reason", "")
                if Why.NO_MAP.message in self._unmoved and not order:
                    break
                time.sleep(0.1)
            else:
                return

    def in_full(self) -> Iterator[Part]:
        """Full prefill's answers, which all others are compared with."""
        yield from self._asked(Outcome("full", "", 1.0, times_computed=self._times_computed), FULL)

    def blended(self, ratio: float) -> Iterator[Part]:
        # KV that was blended at another ratio is no measure of this one.
        request = {"recompute_ratio": ratio, "store": False, "settled": False}
        yield from self._asked(Outcome(self._job.selector, "", ratio), request)

    def _asked(self, outcome: Outcome, request: dict[str, Any]) -> Iterator[Part]:
        """Ask all prompts, with these settings of a request."""
        prompts = self._prompts.asked
        self._llm.reset_prefix_cache()
        for at in range(0, len(prompts), PART):
            answers = self._answers(at, prompts[at : at + PART], request)
            if request is FULL:
                self._full += answers
            for number, ours in enumerate(answers, at):
                moved = ours.report.get("moved_tokens", 0)
                scores = judge(self._full[number], ours, self._right(number))
                # Exact reuse loses nothing, and says nothing of a selector.
                counted = scores if moved or request is FULL else [None] * len(scores)
                outcome.note([counted], ours.report["recomputed_tokens"] / moved if moved else 1.0)
            if at + PART < len(prompts):
                yield Part(len(answers))
        for prompt in prompts[:TIMED]:
            self._llm.reset_prefix_cache()
            started = time.perf_counter()
            self._first_tokens([prompt], request)
            outcome.first_token_s.append(time.perf_counter() - started)
        yield Part(len(answers), outcome)

    def _answers(self, at: int, prompts: Sequence[list[int]], request: dict[str, Any]) -> list[Answer]:
        if request is FULL:
            sampling = [self._sampling(request, self._job.tokens, logprobs=self._n_logprobs)] * len(prompts)
        else:
            sampling = [
                self._sampling(request, len(full.tokens), full.tokens, ignore_eos=True, logprobs=self._n_logprobs)
                for full in self._full[at : at + len(prompts)]
            ]
        return [
            Answer(
                list(answer.outputs[0].token_ids),
                [{token: it.logprob for token, it in likely.items()} for likely in answer.outputs[0].logprobs],
                _report(answer),
            )
            for answer in self._generated(prompts, sampling)
        ]

    def _right(self, number: int) -> int:
        """With how many of its tokens full prefill has given a right answer; 0 if it is wrong or not known."""
        tokens = self._full[number].tokens
        if self._tokenizer is None:
            return 0
        begun = [self._tokenizer.decode(tokens[:end], skip_special_tokens=True) for end in range(1, len(tokens) + 1)]
        ends = [end for right in self._job.questions[number].answers if (end := end_of(right, begun[-1]))]
        return next((n for n, text in enumerate(begun, 1) if len(text) >= min(ends)), 0) if ends else 0

    def _first_tokens(self, prompts: Sequence[list[int]], request: dict[str, Any]) -> list[dict[str, Any]]:
        """The reports of prompts that are answered with one token."""
        return list(map(_report, self._generated(prompts, [self._sampling(request, 1)] * len(prompts))))

    def _generated(self, prompts: Sequence[list[int]], sampling: list[Any]) -> list[Any]:
        prompts_of_ids: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._llm.generate(prompts_of_ids, sampling, use_tqdm=False)

    def _sampling(self, request: dict[str, Any], tokens: int, forced: Sequence[int] = (), **more: Any) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"blendhub": request}, **({"forced": forced} if forced else {})}
        return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, extra_args=extra, **more)


def end_of(answer: str, text: str) -> int:
    """Where an answer ends that stands in a text as whole words; 0: it does not stand there."""
    match = re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, re.IGNORECASE)
    return match.end() if match else 0


def _report(answer: Any) -> dict[str, Any]:
    report: dict[str, Any] = (answer.kv_transfer_params or {}).get("blendhub", {})
    return report
