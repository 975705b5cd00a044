"""The command line: options, files of options, and presets, which are options under a name."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from benchmarks.holes.order import NAMES, Place
from benchmarks.holes.passes import Method, Submit
from benchmarks.holes.presets import OWN, PRESETS, PUBLISHED
from benchmarks.quality.arguments import Parser, at_least
from blendhub.vllm.settings import Settings

DESCRIPTION = "The cost of documents without stored KV in the middle of a prompt, in several passes over all queries."


def parsed(arguments: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """The parsed arguments: the command line over the file of options, and that file over the preset."""
    parser, said = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    if file := parser.parse(said).options:
        said = [*_from_file(parser, file), *said]
    if preset := parser.parse(said).preset:
        said = [*_said(PRESETS[preset]), *said]
    return parser, parser.parse(said)


def _parser() -> Parser:
    parser = Parser("python -m benchmarks.holes", DESCRIPTION)
    add = parser.add_argument
    place = f"a number from 0 on, or {', '.join(NAMES)}; -1: the middle"
    add(
        "--hole-ids",
        type=_place,
        nargs="*",
        default=[],
        metavar="N",
        help=f"documents not computed before: {place}",
    )
    add("--hole-positions", type=_place, nargs="*", default=[], metavar="N", help="where each of them stands")
    add("--inflate", type=at_least(0), default=0, metavar="N", help="add so many documents of other queries")
    add("--most-documents", type=at_least(1), metavar="N", help="only the first documents of each query")
    add("--most-document-tokens", type=at_least(1), metavar="N", help="only the first tokens of each document")
    add("--separator", default="", metavar="TEXT", help="stands behind the header and each document; default: nothing")
    add("--behind-header", action="store_true", help="compute documents behind the header, and not alone")
    add("--method", choices=get_args(Method), nargs="+", default=["blend"], help="default blend; several run in turn")
    add("--recompute-ratio", type=_share, nargs="+", default=[0.15], metavar="R", help="one or several; default 0.15")
    add("--selector", default=Settings().selector.name, metavar="NAME", help="default: BlendHub's own")
    add("--passes", type=at_least(1), default=2, metavar="N", help="the first fills the holes; default 2")
    add("--repeats", type=at_least(1), default=1, metavar="N", help="each begins with nothing stored; default 1")
    add("--submit", choices=get_args(Submit), default="one", help="all at once, or one by one; default one")
    names = f"own: {', '.join(OWN)}; as published: {', '.join(PUBLISHED)}"
    add("--preset", choices=PRESETS, metavar="NAME", help=f"options under a name; {names}")
    add("--options", type=Path, metavar="FILE", help="YAML whose keys are these options: {'hole_ids': [2], ...}")
    add("--json", type=Path, metavar="FILE", help="write rows and answers to this file, and a plot beside it")
    return parser


def _from_file(parser: Parser, file: Path) -> list[str]:
    expected = "it should have options as its keys, as in hole_ids: [2]"
    try:
        options = msgspec.yaml.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        parser.error(f"cannot read {file}: {error}; {expected}")
    names = vars(parser.parse([])).keys() - {"options"}
    if unknown := sorted(options.keys() - names):
        parser.error(f"{file} has the keys {', '.join(unknown)}, which are no options; {', '.join(sorted(names))} are")
    return _said(options)


def _said(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line says them; false and null leave one out."""
    said = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            said += [flag, *map(str, value)]
        elif value is True:
            said.append(flag)
        elif value is not None and value is not False:
            said.append(f"{flag}={value}")
    return said


def _place(text: str) -> Place:
    if text in NAMES:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, or {', '.join(NAMES)}, got {text!r}") from None


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return share
