"""``python -m examples.demo``: starts vLLM with SmolLM2-135M-Instruct, and asks it questions in three ways."""

from pathlib import Path

from examples.demo import command, experiment
from examples.demo.workload import Workload


def _measure(workload: Workload) -> list[experiment.Measured]:
    with command.start_engine({"hub": {"arena_gib": 1.0, "metrics": ""}}) as engine:
        experiment.show(engine, workload)
        return experiment.measure(engine, workload)


if __name__ == "__main__":
    command.run("examples.demo", "Ask questions in three ways.", Path("build/demo"), _measure)
