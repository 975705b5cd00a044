"""On a machine with an accelerator, from a plain checkout: all tests of its device for real, then its benchmark.

Writes ``build/NAME-check/report.json``, and returns 0 only if every test passed and every bar was met.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from blendhub.contracts import Device
from blendhub.hookspecs import PluginSpec

ROOT = Path(__file__).parents[1]


def check(name: str, plugin: PluginSpec[Device], folder: str, benchmark: str, machine: Callable[[], dict]) -> int:
    """``folder`` has the plugin's tests, ``benchmark`` is a module, ``machine`` says what the report names."""
    unavailable = plugin.probe()
    if unavailable:
        print(f"nothing can be checked here: {unavailable.reason}; try: {unavailable.command}")
        return 2
    target = ROOT / "build" / f"{name}-check"
    target.mkdir(parents=True, exist_ok=True)
    tests, rows = target / "tests.xml", target / "benchmark.json"
    for stale in (tests, rows):
        stale.unlink(missing_ok=True)
    _run("pytest", f"{folder}/tests", f"--junitxml={tests}")
    _run(benchmark, "--json", str(rows))
    report = {
        **machine(),
        "details": plugin.details(),
        "tests": _counts(tests) if tests.exists() else None,
        "benchmark": json.loads(rows.read_text()) if rows.exists() else None,
    }
    report["ok"] = _is_good(report)
    (target / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{machine()}: tests {report['tests']}; {'all is well' if report['ok'] else 'SOMETHING FELL SHORT'}")
    print(f"the report is {target / 'report.json'}")
    return 0 if report["ok"] else 1


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False)


def _counts(junit: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def _is_good(report: dict) -> bool:
    tests, benchmark = report["tests"], report["benchmark"]
    if not tests or not benchmark or tests["failures"] or tests["errors"]:
        return False
    return all(row["ok"] for row in benchmark["rows"])
