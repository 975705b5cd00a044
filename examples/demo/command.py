"""The command line of a demo: its arguments, its steps, and what it prints."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.serving import PLAIN
from examples.demo import report
from examples.demo.experiment import LONGEST, Measured, Workload
from harness.engines import Engine

NEEDED = ("vllm", "torch", "matplotlib")


def run(module: str, description: str, out: Path, measure: Callable[[Workload, Progress], list[Measured]]) -> None:
    options = _arguments(module, description, out)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"The demo needs {' and '.join(missing)}, which {sys.executable} does not have: run `make setup`")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        with step(progress, "write prompts"):
            workload = Workload(options.prompts, options.questions)
        measured = measure(workload, progress)
    result = report.make_report(measured)
    report.write(result, options.out / "report.json")
    from examples.demo import plot  # not at the top: it needs matplotlib, which may be what is missing

    plot.draw(result, options.out / "plan.png")
    console.print(f"\n{report.in_words(result)}\n", highlight=False)
    console.print(report.as_table(result))
    print(f"{options.out}/plan.png shows what became of each token, {options.out}/report.json has the figures.")


def start_engine(blendhub: dict[str, Any], arrange: Sequence[str] = ()) -> Engine:
    lengths = {"max_model_len": LONGEST + 64, "max_num_batched_tokens": LONGEST}
    return Engine(CHECKPOINT, blendhub, arrange=arrange, **lengths, **PLAIN)


@contextmanager
def step(progress: Progress, what: str) -> Iterator[None]:
    task = progress.add_task(what, total=None)
    yield
    progress.update(task, total=1, completed=1)


def _arguments(module: str, description: str, out: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--prompts", type=_count, default=6, metavar="N", help="how many there are (default 6)")
    parser.add_argument("--questions", type=_count, default=12, metavar="N", help="to each prompt (default 12)")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=f"default {out}")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)
