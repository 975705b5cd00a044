"""The arguments of the benchmarks that ask questions: the small reader, or any model and a file of questions."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.quality.reader import CHECKPOINT
from blendhub.tools.advice.questions import SHAPES


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number of {least} or more, got {text!r}")
        return int(text)

    return number


class Parser(argparse.ArgumentParser):
    """Has what both benchmarks take; each adds the rest."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog="Without --model, the models of the repository are asked. Shapes of --data, as a list or by line:\n"
            + SHAPES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--quick", action="store_true", help="few questions: shows that it runs, measures little")
        self.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="another one of the reader")
        self.add_argument("--model", metavar="NAME_OR_PATH", help="any model that vLLM serves; needs --data")
        self.add_argument("--data", type=Path, metavar="FILE", help="questions to several documents; needs --model")
        self.add_argument(
            "--until", type=at_least(1), metavar="N", help="only so many questions; of the real model, of each workload"
        )

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        given = self.parse_args(arguments)
        if bool(given.model) != bool(given.data):
            self.error("--model and --data belong together")
        return given
