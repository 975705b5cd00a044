"""``python -m examples.demo``: starts vLLM with a small trained reader, and asks it questions in four ways."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.serving import READER
from engine_harness import Engine
from examples.demo import experiment, report
from examples.demo.workload import LONGEST, Workload

NEEDED = ("vllm", "torch", "matplotlib")
BLENDHUB = {"hub": {"arena_gib": 0.5, "metrics": ""}}


def main() -> None:
    options = _arguments()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"The demo needs {' and '.join(missing)}, which {sys.executable} does not have: run `make setup`")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    result = report.make_report(_measure(options, console))
    report.write(result, options.out / "report.json")
    from examples.demo import plot  # not at the top: it needs matplotlib, which may be what is missing

    plot.draw(result, options.out / "plan.png")
    console.print(report.as_table(result))
    print(f"{options.out}/plan.png shows what became of each token, {options.out}/report.json has the figures.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Ask questions in four ways.")
    parser.add_argument("--prompts", type=_count, default=6, metavar="N", help="how many there are (default 6)")
    parser.add_argument("--questions", type=_count, default=24, metavar="N", help="to each prompt (default 24)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="FOLDER", help="default build/demo")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _measure(options: argparse.Namespace, console: Console) -> list[experiment.Measured]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        with _step(progress, "write prompts"):
            workload = Workload(options.prompts, options.questions)
        with _step(progress, "start vLLM"):
            engine = Engine(CHECKPOINT, BLENDHUB, max_model_len=LONGEST + 64, max_num_batched_tokens=LONGEST, **READER)
        with engine:
            return experiment.run(engine, workload, progress)


@contextmanager
def _step(progress: Progress, what: str) -> Iterator[None]:
    task = progress.add_task(what, total=None)
    yield
    progress.update(task, total=1, completed=1)


if __name__ == "__main__":
    main()
