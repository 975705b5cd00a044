"""``python -m examples.demo``: makes a small model, starts vLLM with it, and serves prompts in three ways."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from engine_harness import Engine
from engine_harness.tiny_model import make_tiny_model
from examples.demo import experiment, report
from examples.demo.workload import LONGEST, Workload

NEEDED = ("vllm", "torch", "matplotlib")
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "max_position_embeddings": 2 * LONGEST,
}
BLENDHUB = {"hub": {"arena_gib": 0.5, "metrics": ""}}


def main() -> None:
    options = _arguments()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"The demo needs {' and '.join(missing)}, which {sys.executable} does not have: run `make setup`")
    options.out.mkdir(parents=True, exist_ok=True)
    shape = MODEL | {"num_hidden_layers": options.layers}
    console = Console()
    measured = _measure(options, shape, console)
    result = report.make_report(measured, shape)
    report.write(result, options.out / "report.json")
    from examples.demo import plot  # not at the top: it needs matplotlib, which may be what is missing

    plot.draw(result, options.out / "plan.png")
    console.print(report.as_table(result))
    print(f"{options.out}/plan.png shows what became of each token, {options.out}/report.json has the figures.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Serve prompts in three ways.")
    parser.add_argument("--prompts", type=_count, default=3, metavar="N", help="how many are served (default 3)")
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="how often, each way (default 3)")
    parser.add_argument("--layers", type=_count, default=8, metavar="N", help="of the model (default 8)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="FOLDER", help="default build/demo")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _measure(options: argparse.Namespace, shape: dict[str, Any], console: Console) -> list[experiment.Measured]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        with _step(progress, "make a model with random weights"):
            model = make_tiny_model(options.out / "model", **shape)
        with _step(progress, "start vLLM"):
            engine = Engine(model, BLENDHUB, max_model_len=LONGEST + 64, max_num_batched_tokens=LONGEST)
        with engine:
            return experiment.run(engine, Workload(shape["vocab_size"]), options.prompts, options.rounds, progress)


@contextmanager
def _step(progress: Progress, what: str) -> Iterator[None]:
    task = progress.add_task(what, total=None)
    yield
    progress.update(task, total=1, completed=1)


if __name__ == "__main__":
    main()
