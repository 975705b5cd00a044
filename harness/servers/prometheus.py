"""A Prometheus of this test alone, and its tool that checks metrics and rules."""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.ports import free_port

START_S = 60.0
BINARY = shutil.which("prometheus")
TOOL = shutil.which("promtool")
MISSING = "no prometheus and promtool here; install them with: apt-get install prometheus"
needs_prometheus = pytest.mark.skipif(BINARY is None or TOOL is None, reason=MISSING)


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """What `promtool` said, and its exit code. ``given`` is its input."""
    assert TOOL, MISSING
    return subprocess.run([TOOL, *arguments], input=given, capture_output=True, text=True, timeout=60)


class Prometheus:
    """Scrapes every second. Leaves nothing when it is closed."""

    def __init__(self, jobs: Mapping[str, Sequence[str]], rules: Sequence[Path] = ()) -> None:
        """``jobs``: the targets of each, as HOST:PORT."""
        assert BINARY, MISSING
        self._folder = tempfile.TemporaryDirectory(prefix="blendhub-prometheus-")
        scraped = [{"job_name": job, "static_configs": [{"targets": [*some]}]} for job, some in jobs.items()]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(file.resolve()) for file in rules],
            "scrape_configs": scraped,
        }
        file = Path(self._folder.name, "prometheus.yml")
        file.write_text(json.dumps(config))  # which is YAML, too
        self._address = f"127.0.0.1:{free_port()}"
        self._log = Path(self._folder.name, "log")
        flags = {"config.file": file, "storage.tsdb.path": self._folder.name, "web.listen-address": self._address}
        with self._log.open("w") as log:
            command = [BINARY, *(f"--{name}={value}" for name, value in flags.items())]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._wait_until_ready()

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

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"http://{self._address}/-/ready", timeout=10).raise_for_status()
                return
            except httpx.HTTPError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self._process.kill()
                    raise TimeoutError(f"Prometheus does not answer: {self._log.read_text()[-500:]}") from None
                time.sleep(0.05)
