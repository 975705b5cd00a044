"""The alerts and the dashboard name metrics that exist, and each alert is tested by Prometheus' own tool."""

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the names of the engine's metrics need vLLM; `make setup` installs it")

from harness.servers.prometheus import needs_prometheus, promtool
from tests.dashboard import ALERTS, DASHBOARD, queries
from tests.metric_names import OF_HUB
from tests.metric_names_of_vllm import OF_ENGINE

TESTS = ALERTS.with_name("alerts.test.yaml")


@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_then():
    checked = promtool("test", "rules", str(TESTS))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = re.findall(r"alertname: (\w+), eval_time: \w+, exp_alerts: \[\]", TESTS.read_text())
    fired = re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels", TESTS.read_text())
    assert len(alerts) == 4 and sorted(alerts) == sorted(tested) == sorted(fired)


@pytest.mark.parametrize("file", [ALERTS, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_of_ours_exists(file: Path):
    words = " ".join(queries()) if file is DASHBOARD else file.read_text()
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:vllm:)?blendhub_\w+", words)}
    known = {f"blendhub_{name}" for name in OF_HUB} | {f"vllm:blendhub_{name}" for name in OF_ENGINE}
    # Shared stores count what they like.
    assert {name for name in named - known if not re.fullmatch(r"blendhub_fleet_\w+_bytes_total", name)} == set()
