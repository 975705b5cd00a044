"""``python -m examples.demo``: starts vLLM with SmolLM2-135M-Instruct, and asks it questions in three ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.demo.command import Engines, run, start_engine


@contextmanager
def one_engine() -> Iterator[Engines]:
    with start_engine({"hub": {"arena_gib": 1.0, "metrics": ""}}) as engine:
        yield engine, engine, lambda: None


if __name__ == "__main__":
    run("examples.demo", Path("build/demo"), one_engine)
