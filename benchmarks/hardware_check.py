"""On a machine with an accelerator, from a plain checkout: all tests of its device for real, its benchmark, an engine.

Writes ``NAME-check/report.json`` in ``$OUT`` or ``build``. Returns 0 only if every test passed and every bar was met.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from benchmarks.report import Row
from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec

ROOT = Path(__file__).parents[1]


def check(
    name: str,
    plugin: PluginSpec[Device],
    machine: Callable[[], dict[str, Any]],
    *,
    tests_in: str | None = None,
    benchmark: Sequence[str] = (),
    engine: Callable[[], Sequence[Row]] = lambda: (),
) -> int:
    """``machine`` says what the report names, ``tests_in`` is the folder of the plugin, ``benchmark`` a module and its
    arguments; each may be left out. ``engine`` says how an engine of this machine starts and blends.
    """
    unavailable = plugin.probe()
    if unavailable:
        print(f"nothing can be checked here: {unavailable.reason}; try: {unavailable.command}")
        return 2
    target = Path(os.environ.get("OUT") or ROOT / "build") / f"{name}-check"
    target.mkdir(parents=True, exist_ok=True)
    tests, rows = target / "tests.xml", target / "benchmark.json"
    for stale in (tests, rows):
        stale.unlink(missing_ok=True)
    if tests_in:
        at_once = ["-n", "12"] if find_spec("xdist") else []
        _run("pytest", f"{tests_in}/tests", f"--junitxml={tests}", *at_once)
    if benchmark:
        _run(*benchmark, "--json", str(rows))
    report = {
        **machine(),
        "details": plugin.details(),
        "tests": _counts(tests) if tests.exists() else None,
        "benchmark": json.loads(rows.read_text()) if rows.exists() else None,
        "engine": [msgspec.structs.asdict(row) for row in engine()],
    }
    missing = (tests_in and not report["tests"]) or (benchmark and not report["benchmark"])
    report["ok"] = not missing and _is_good(report)
    (target / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for row in report["engine"]:
        print(f"{row['id']}: {row['what']}", "" if row["value"] is None else f"= {row['value']:.3g}")
    print(f"{machine()}: tests {report['tests']}; {'all is well' if report['ok'] else 'SOMETHING FELL SHORT'}")
    print(f"the report is {target / 'report.json'}")
    return 0 if report["ok"] else 1


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False)


def _counts(junit: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def _is_good(report: dict[str, Any]) -> bool:
    tests, benchmark = report["tests"] or {}, report["benchmark"] or {"rows": []}
    if tests.get("failures") or tests.get("errors"):
        return False
    # Rows without a bar are figures; an engine's row without a verdict says why none was started.
    barred = [row for row in benchmark["rows"] if row["bar"] is not None]
    return all(row["ok"] for row in barred) and all(row["ok"] is not False for row in report["engine"])
