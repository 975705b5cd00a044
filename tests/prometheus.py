"""A Prometheus of this test alone, and its tool that checks metrics and rules."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.waiting import Closing, free_port, wait_until

START_S = 60.0
BINARY = shutil.which("prometheus")
TOOL = shutil.which("promtool")
MISSING = "no prometheus and promtool here; install them with: apt-get install prometheus"
needs_prometheus = pytest.mark.skipif(BINARY is None or TOOL is None, reason=MISSING)


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """What `promtool` said, and its exit code. ``given`` is its input."""
    assert TOOL, MISSING
    return subprocess.run([TOOL, *arguments], input=given, capture_output=True, text=True, timeout=60)


class Prometheus(Closing):
    """Scrapes every second. Leaves nothing when it is closed."""

    def __init__(self, jobs: Mapping[str, Sequence[str]], rules: Sequence[Path] = ()) -> None:
        """``jobs``: the targets of each, as HOST:PORT."""
        assert BINARY, MISSING
        self._folder = tempfile.TemporaryDirectory(prefix="blendhub-prometheus-")
        scraped = [{"job_name": job, "static_configs": [{"targets": [*targets]}]} for job, targets in jobs.items()]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(file.resolve()) for file in rules],
            "scrape_configs": scraped,
        }
        file = Path(self._folder.name, "prometheus.yml")
        file.write_text(json.dumps(config))  # which is YAML, too
        self._address = f"127.0.0.1:{free_port()}"
        flags = {"config.file": file, "storage.tsdb.path": self._folder.name, "web.listen-address": self._address}
        command = [BINARY, *(f"--{name}={value}" for name, value in flags.items())]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: httpx.get(f"http://{self._address}/-/ready", timeout=10).raise_for_status(), START_S)

    def query(self, asked: str) -> list[dict[str, Any]]:
        """The series that a query finds now, with their values. Raises with Prometheus' own words if it is wrong."""
        answer = httpx.get(f"http://{self._address}/api/v1/query", params={"query": asked}, timeout=10).json()
        if answer["status"] != "success":
            raise ValueError(f"{asked}: {answer['error']}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()
