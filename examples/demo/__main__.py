"""``python -m examples.demo``: starts vLLM with SmolLM2-135M-Instruct, and asks it questions in three ways."""

from pathlib import Path

from rich.progress import Progress

from examples.demo import command, experiment
from examples.demo.workload import Workload

BLENDHUB = {"hub": {"arena_gib": 1.0, "metrics": ""}}


def _measure(workload: Workload, progress: Progress) -> list[experiment.Measured]:
    with command.step(progress, "start vLLM"):
        engine = command.start_engine(BLENDHUB)
    with engine:
        experiment.show(engine, workload, progress)
        return experiment.measure(engine, workload, progress)


if __name__ == "__main__":
    command.run("examples.demo", "Ask questions in three ways.", Path("build/demo"), _measure)
