"""``python -m examples.demo``: vLLM answers questions about documents seen before, in four ways, and shows what each
reused. The model is Qwen2.5-Coder of half a billion parameters where that was downloaded, and SmolLM2-135M elsewhere.

The documents were seen among others, in another order. Their people never lived: the model knows them only from its
prompt.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.quality.serving import PLAIN
from benchmarks.quality.workloads import LONGEST, ONE_WORD, Chat, biographies, case_of, visits
from benchmarks.timing import progress
from blendhub.core.spans import Span
from blendhub.outcome.fates import Fate, Stretch, count, strip_of
from blendhub.system.served_vllm import NUMA, lacks_numa, server_command
from harness.engines import Engine
from harness.engines.real_model import MODELS, NoRealModel, make_real_model

NEEDED = ("vllm", "torch", "gguf")
ASKED = ("qwen-0.5b", "smollm2")
ANSWER_TOKENS = 8
SHOWN = 6
"""As many questions fit into a terminal beside the figures."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("vLLM alone", {"mode": "off"}),
    "default": ("by default", {}),
    "blended": ("doubt 0", {"doubt": 0.0}),
    "moved": ("as stored", {"recompute_ratio": 0.0, "doubt": 0.0}),
}
"""The title of each way, and what its requests ask of BlendHub. By default, some tokens are recomputed, and a token
that the model is unsure of waits until all KV is exact."""
NEXT = f"""\
Measure your own model: blendhub advise --model MODEL --data FILE
Serve your own model: {server_command({"kv_connector": "BlendHubConnector", "kv_role": "kv_both"})}"""

Engines = tuple[Engine, Engine, Callable[[], None]]
"""The engine that sees the documents first, the one that is asked about them, and what to wait for between."""


class Answer(msgspec.Struct):
    """The answer to one question, asked in one way."""

    question: str
    way: str
    answer: str
    first_token_s: float
    whole_s: float
    """After which time the answer was whole."""
    plan: list[Stretch]
    """The fate of each token of the prompt."""


class Figures(msgspec.Struct):
    """Those of one way, over all questions."""

    first_token_s: float
    """The median, as the next three."""
    speed_up: float
    """Full prefill's time to the first token over this way's, of the same question."""
    whole_s: float
    whole_speed_up: float
    same_answers: float
    """The share of answers that are full prefill's, word for word."""
    tokens: dict[Fate, int]


@contextmanager
def step(what: str) -> Iterator[None]:
    """Something that takes a while, which is said before and after it."""
    begun = time.monotonic()
    print(f"{what} ...", flush=True)
    yield
    print(f"{what}: {time.monotonic() - begun:.0f} s", flush=True)


def run(module: str, out: Path, start: Callable[[Path], AbstractContextManager[Engines]]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Ask questions in four ways.")
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="each with four questions (default 3)")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=f"default {out}")
    parser.add_argument("--model", choices=[*ASKED], default=default_model(), help="default here: %(default)s")
    options = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"The demo needs {' and '.join(missing)}, which {sys.executable} does not have: run `make setup`")
    if lacks_numa():
        sys.exit(f"The demo needs libnuma.so.1, with which vLLM's operators for CPUs are linked: {NUMA}")
    asked = MODELS[options.model]
    try:
        with step(f"make {asked.title} ready"):
            model = make_real_model(asked)
    except NoRealModel as error:
        sys.exit(f"The demo cannot begin: {error}")
    print(f"{model} has {sum(file.stat().st_size for file in model.iterdir()) / 1e6:,.0f} MB", flush=True)
    with start(model) as engines:
        answers = ask_all(engines, model, options.prompts)
    figures = {way: _figures(answers["full"], answers[way]) for way in WAYS}
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"ways": figures, "answers": [answer for of_way in answers.values() for answer in of_way]}
    (options.out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(asked.title, answers, figures)
    print(f"\n{options.out}/report.json has all answers, and what became of each token.\n\n{NEXT}")


def default_model() -> str:
    """The largest of those that are here, or the smallest, which `make setup` brings."""
    return next((name for name in ASKED if MODELS[name].is_here), ASKED[-1])


def start_engine(model: Path, blendhub: dict[str, Any]) -> Engine:
    lengths = {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST}
    with step("start vLLM"):
        return Engine(model, blendhub | {"audit_share": 0, "repair": "off"}, **lengths, **PLAIN)


def ask_all(engines: Engines, model: Path, n_prompts: int) -> dict[str, list[Answer]]:
    """Show all documents, until all may move, then ask each question in four ways in turn: whatever else the machine
    does meets all ways alike. The answers of each way, question by question.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    writer, reader, wait_until_shared = engines
    prompts = list(islice(biographies(), 1 + n_prompts))
    cases = [case_of(Chat(tokenizer), ONE_WORD, *prompt) for prompt in prompts]
    for tokens in progress(visits(cases, until_deep=True), "show it the documents", sys.stdout):
        writer.one(tokens)
    wait_until_shared()

    def ask(tokens: list[int], way: str) -> Any:
        reader.forget()
        return reader.one(tokens, tokens=ANSWER_TOKENS, store=False, explain=True, **WAYS[way][1])

    # What happens for the first time takes longer: code is compiled, memory touched. The first prompt warms up.
    for way in WAYS:
        ask(cases[0].body, way)
    answers: dict[str, list[Answer]] = {way: [] for way in WAYS}
    turns = [
        ([*case.body, *question.tokens], text.question, way)
        for case, (_, texts) in zip(cases[1:], prompts[1:], strict=True)
        for question, text in zip(case.questions, texts, strict=True)
        for way in WAYS
    ]
    for tokens, question, way in progress(turns, "ask in four ways", sys.stdout):
        answer = ask(tokens, way)
        spans = msgspec.convert(answer.report.get("spans", {}), dict[str, list[Span]])
        plan = strip_of(len(tokens), answer.report["engine_tokens"], spans)
        # Up to the first comma or full stop.
        words = re.split(r"[.,\n]", tokenizer.decode(answer.tokens, skip_special_tokens=True))[0].strip()
        answers[way].append(Answer(question, way, words, answer.first_token_s, answer.ended_s, plan))
    return answers


def _figures(full: list[Answer], ours: list[Answer]) -> Figures:
    pairs, counts = list(zip(full, ours, strict=True)), [count(answer.plan) for answer in ours]
    return Figures(
        statistics.median(answer.first_token_s for answer in ours),
        statistics.median(theirs.first_token_s / answer.first_token_s for theirs, answer in pairs),
        statistics.median(answer.whole_s for answer in ours),
        statistics.median(theirs.whole_s / answer.whole_s for theirs, answer in pairs),
        statistics.mean(theirs.answer == answer.answer for theirs, answer in pairs),
        {fate: sum(counted[fate] for counted in counts) for fate in Fate},
    )


def show(model: str, answers: dict[str, list[Answer]], figures: dict[str, Figures]) -> None:
    """A table of 80 columns, and what it shows in one sentence."""
    table = Table(title=f"{model}: answers, medians, and what became of the tokens", box=box.SIMPLE_HEAD, width=80)
    table.add_column("", ratio=1)
    for title, _ in WAYS.values():
        table.add_column(title, width=11)
    for asked in list(zip(*answers.values(), strict=True))[:SHOWN]:
        table.add_row(asked[0].question, *(answer.answer for answer in asked))
    table.add_section()
    ways = figures.values()
    table.add_row("first token after", *(f"{1e3 * way.first_token_s:.0f} ms" for way in ways))
    table.add_row("speed-up", *(f"{way.speed_up:.1f} x" for way in ways))
    table.add_row("whole answer after", *(f"{1e3 * way.whole_s:.0f} ms" for way in ways))
    table.add_row("speed-up", *(f"{way.whole_speed_up:.1f} x" for way in ways))
    table.add_row("the same answer", *(f"{way.same_answers:.0%}" for way in ways), end_section=True)
    for fate in Fate:
        shares = [way.tokens[fate] / sum(way.tokens.values()) for way in ways]
        if any(shares):
            table.add_row(fate.label, *(f"{share:.0%}" for share in shares))
    console = Console(width=80)
    console.print(table)
    default, blended, moved = figures["default"], figures["blended"], figures["moved"]
    console.print(
        f"By default, {default.same_answers:.0%} of the answers are those of vLLM alone, because a token that the "
        f"model is unsure of waits until all KV is exact, and they begin {default.speed_up:.1f} x as soon; with "
        f"nothing to wait for (doubt 0), {blended.same_answers:.0%} and {blended.speed_up:.1f} x; with stored text "
        f"reused as it is, {moved.same_answers:.0%} and {moved.speed_up:.1f} x. A larger model is sure more often, and "
        "waits less.",
        highlight=False,
    )


@contextmanager
def one_engine(model: Path) -> Iterator[Engines]:
    with start_engine(model, {"hub": {"arena_gib": 1.0, "metrics": ""}}) as engine:
        yield engine, engine, lambda: None


if __name__ == "__main__":
    run("examples.demo", Path("build/demo"), one_engine)
