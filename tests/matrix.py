"""What ran on which vLLM, with dates: as a plugin of pytest, it notes each test's outcome in ``build/matrix.json``.

``make test-vllm`` runs with it. ``python -m tests.matrix``, which ``make matrix`` runs, adds these results to those
that the repository keeps, from which the tables of docs/support.md are made.
"""

import datetime
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

KEPT = Path(__file__).with_suffix(".json")
NOTED = Path(__file__).parent.parent / "build" / "matrix.json"
RANKS = ("skipped", "passed", "failed")
"""What a test with several reports is, last what counts most."""


class Result(msgspec.Struct, array_like=True):
    outcome: str
    on: datetime.date


class Run(msgspec.Struct, kw_only=True):
    """The results of one vLLM on one kind of machine."""

    vllm: str
    compiled: str
    """The version of vLLM whose compiled parts ran, or ``its own``."""
    torch: str
    python: str
    device: str
    """The name of the accelerator; ``CPU`` without one."""
    tests: dict[str, Result] = {}

    @property
    def key(self) -> tuple[str, str]:
        return self.vllm, self.device


def read(file: Path) -> list[Run]:
    return msgspec.json.decode(file.read_bytes(), type=list[Run]) if file.exists() else []


def merge(runs: Iterable[Run], newer: Iterable[Run]) -> list[Run]:
    """The runs with what newer ones say of a test in the place of what was known of it."""
    merged = {run.key: run for run in runs}
    for run in newer:
        known = merged[run.key].tests if run.key in merged else {}
        merged[run.key] = msgspec.structs.replace(run, tests={**known, **run.tests})
    return sorted(merged.values(), key=lambda run: run.key)


def still_there(runs: Iterable[Run]) -> list[Run]:
    """The runs without the results of tests that the repository no longer has."""
    kept = []
    for run in runs:
        tests = {name: result for name, result in run.tests.items() if _is_there(name)}
        kept.append(msgspec.structs.replace(run, tests=tests))
    return kept


def _is_there(name: str) -> bool:
    file, _, test = name.partition("[")[0].partition("::")
    path = KEPT.parent.parent / file
    return path.is_file() and f"def {test}(" in path.read_text(encoding="utf-8")


def write(file: Path, runs: list[Run]) -> None:
    """One line for each test, so that a change shows what changed."""
    lines = []
    for run in runs:
        tests = ",\n".join(
            f"    {msgspec.json.encode(name).decode()}: {msgspec.json.encode(result).decode()}"
            for name, result in sorted(run.tests.items())
        )
        head = msgspec.json.encode(msgspec.structs.replace(run, tests={})).decode()
        lines.append(head.replace('"tests":{}', f'"tests":{{\n{tests}\n  }}'))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n", encoding="utf-8")


def this_machine() -> Run:
    import torch
    import vllm

    own = next(Path(vllm.__file__).parent.glob("_C*.so"), None)
    borrowed = own is not None and own.is_symlink() and own.resolve().parent != Path(vllm.__file__).parent.resolve()
    return Run(
        vllm=vllm.__version__.partition("+")[0],
        compiled="of another version" if borrowed else "its own",
        torch=torch.__version__.partition("+")[0],
        python=".".join(map(str, sys.version_info[:2])),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    )


class Recorder:
    """Writes what it knows after each test, so that a run which is ended keeps it."""

    def __init__(self) -> None:
        self._run = msgspec.structs.replace(this_machine(), tests={})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self._run.tests.get(report.nodeid)
        # What is put up before a test and taken down after it says something only if it fails, or skips the test.
        if report.when == "call" or not report.passed:
            rank = max(report.outcome, known.outcome if known else "skipped", key=RANKS.index)
            self._run.tests[report.nodeid] = Result(rank, datetime.date.today())
            write(NOTED, merge(read(NOTED), [self._run]))


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if not is_worker and find_spec("vllm"):
        config.pluginmanager.register(Recorder())


if __name__ == "__main__":
    write(KEPT, still_there(merge(read(KEPT), read(NOTED))))
