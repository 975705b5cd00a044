"""On a machine with a GPU, from a plain checkout: all tests of the CUDA device for real, then its benchmark.

Writes ``build/gpu-check/report.json``, and exits with 0 only if every test passed and every bar was met.
"""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import blendhub_cuda
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-check"


def main() -> int:
    (plugin,) = blendhub_cuda.blendhub_devices()
    unavailable = plugin.probe()
    if unavailable:
        print(f"nothing can be checked here: {unavailable.reason}; try: {unavailable.command}")
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    tests, benchmark = FOLDER / "tests.xml", FOLDER / "device.json"
    for stale in (tests, benchmark):
        stale.unlink(missing_ok=True)
    run("pytest", "plugins/cuda/tests", f"--junitxml={tests}")
    run("benchmarks.device", "--json", str(benchmark))
    report = {
        "gpu": torch.cuda.get_device_name(),
        "tests": counts(tests) if tests.exists() else None,
        "benchmark": json.loads(benchmark.read_text()) if benchmark.exists() else None,
    }
    report["ok"] = is_good(report)
    (FOLDER / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['gpu']}: tests {report['tests']}; {'all is well' if report['ok'] else 'SOMETHING FELL SHORT'}")
    return 0 if report["ok"] else 1


def run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False)


def counts(junit: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def is_good(report: dict) -> bool:
    tests, benchmark = report["tests"], report["benchmark"]
    if not tests or not benchmark or tests["failures"] or tests["errors"]:
        return False
    return all(row["ok"] for row in benchmark["rows"])


if __name__ == "__main__":
    sys.exit(main())
