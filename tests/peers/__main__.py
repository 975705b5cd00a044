"""Run another project's tests without BlendHub and with it, and compare how they end with the list of differences."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build"

UNIT = "tests/v1/kv_connector/unit/test_{}.py"
OF_CONNECTORS = (
    "cache_pollution_prevention", "config", "error_propagation", "handshake_pp_aggregation", "hma_auto_config",
    "invalid_blocks_correctness", "kv_connector_lifecycle", "kv_load_failure_recovery", "multi_connector",
    "output_aggregator", "remote_decode_lifecycle", "remote_prefill_lifecycle", "scheduler_kv_connector_override",
)  # fmt: skip


class Project(NamedTuple):
    """Another project's tests."""

    quick: tuple[str, ...]
    slow: tuple[str, ...] = ()
    of_engines: tuple[str, ...] = ()
    """Slow, too, and run apart with ``on_cpu``: others register connectors of the same name, and need other blocks."""
    flags: tuple[str, ...] = ()


PROJECTS = {
    "vllm": Project(
        tuple(map(UNIT.format, OF_CONNECTORS)),
        ("tests/v1/core/test_async_scheduler.py", "tests/v1/core/test_scheduler.py"),
        ("tests/v1/engine/test_abort_final_step.py",),
    ),
    # LMCache's conftest.py imports what needs a GPU.
    "lmcache": Project(("tests/v1/multiprocess/test_blend_matcher.py",), flags=("--noconftest",)),
}


class Ended(NamedTuple):
    """How a test has ended."""

    passed: bool
    asked: bool
    """Whether it asked BlendHub."""


def run(
    name: str, folder: Path, files: tuple[str, ...], flags: tuple[str, ...], log: Path, *, ours: bool
) -> dict[str, Ended]:
    """Run these tests of a project in one process, with BlendHub or without; returns how each has ended, by its id."""
    with tempfile.NamedTemporaryFile() as record, log.open("w") as output:
        paths = (HERE, BUILD / "peers", BUILD.parent, os.environ.get("PYTHONPATH", ""))
        variables = {
            "PEERS_RECORD": record.name,
            "PEERS_OURS": "yes" if ours else "",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HF_HOME": str(BUILD / "peers" / "models"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        options = ("-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "-p", "recorder", "-p", f"on_{name}")
        command = [sys.executable, "-m", "pytest", *options, *flags, *files]
        print(f"{name}'s tests, {'with' if ours else 'without'} BlendHub: {log}", flush=True)
        subprocess.run(command, cwd=folder, env=os.environ | variables, stdout=output, stderr=output)
        try:
            return {test: Ended(*ended) for test, ended in json.load(record).items()}
        except ValueError:
            raise SystemExit(f"the tests did not run; the last lines of {log} say why") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("folder", type=Path, help="the project's source distribution")
    parser.add_argument("--quick", action="store_true", help="leave out the files that take longest")
    given = parser.parse_args()
    project, folder = PROJECTS[given.project], given.folder.resolve()
    groups = [(project.quick if given.quick else project.quick + project.slow, project.flags)]
    if project.of_engines and not given.quick:
        groups.append((project.of_engines, ("-p", "on_cpu")))
    without, ours = dict[str, Ended](), dict[str, Ended]()
    for number, (files, flags) in enumerate(groups):
        for name, ended in (("without", without), ("with", ours)):
            log = folder / f"{name}-blendhub.{number}.log"
            ended |= run(given.project, folder, files, flags, log, ours=ended is ours)

    listed = {
        test: entry["why"]
        for entry in tomllib.loads((HERE / "differences.toml").read_text())[given.project]
        for test in without
        if test.rpartition("/")[2].startswith(tuple(entry["tests"]))
    }
    passed = {test for test, ended in without.items() if ended.passed}
    differing = {test for test in passed if not ours[test].passed}
    print(
        f"{given.project}: of {len(without)} tests, {len(passed)} pass as they are; with BlendHub "
        f"{len(passed - differing)} of these pass and {len(differing & set(listed))} are listed as different; "
        f"{sum(ours[test].asked for test in passed)} of these ask BlendHub"
    )
    faults = dict.fromkeys(differing - set(listed), "fails with BlendHub, and is not listed")
    for test in passed & set(listed) - differing:
        faults[test] = f"passes with BlendHub, but is listed: {listed[test]}"
    for test, fault in sorted(faults.items()):
        print(f"{test} {fault}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
