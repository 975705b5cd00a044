"""The alerts and the dashboard name metrics that exist, and show something with a real Prometheus, hub and engine."""

import contextlib
import json
import math
import re
import time
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="the names of the engine's metrics need vLLM; `make setup` installs it")

from blendhub.hub.config import HubConfig, Listen, StoreChoice
from blendhub.hub.embedded import HubInThread
from harness.engines import Server
from harness.engines.engine import transfer_config
from harness.engines.tiny_model import make_tiny_model
from harness.servers.redis_server import RedisServer, needs_redis
from harness.waiting import free_port
from tests.deploy.deployment import ROOT
from tests.metric_names import OF_HUB
from tests.metric_names_of_vllm import OF_ENGINE
from tests.prometheus import Prometheus, needs_prometheus, promtool
from tests.vllm.conftest import Texts

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
TESTS = ALERTS.with_name("alerts.test.yaml")
VARIABLES = {"$__rate_interval": "1m", "$hubs": ".*", "$engines": ".*"}
SHOWN_S = 240.0
"""How long the traffic goes on until every query has a value: some need evictions, audits and reads from the store."""


def queries() -> list[str]:
    """The dashboard's, as Grafana would send them."""
    panels = json.loads((ROOT / "deploy" / "grafana" / "blendhub.json").read_text(encoding="utf-8"))["panels"]
    variable = re.compile("|".join(map(re.escape, VARIABLES)))
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    return [variable.sub(lambda name: VARIABLES[name[0]], expression) for expression in expressions]


@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_then():
    checked = promtool("test", "rules", str(TESTS))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    alerts = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    tested = re.findall(r"alertname: (\w+), eval_time: \w+, exp_alerts: \[\]", TESTS.read_text())
    fired = re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels", TESTS.read_text())
    assert len(alerts) == 4 and sorted(alerts) == sorted(tested) == sorted(fired)


def test_every_metric_of_ours_exists():
    words = " ".join([*queries(), ALERTS.read_text()])
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:vllm:)?blendhub_\w+", words)}
    known = {f"blendhub_{name}" for name in OF_HUB} | {f"vllm:blendhub_{name}" for name in OF_ENGINE}
    # Shared stores count what they like.
    assert {name for name in named - known if not re.fullmatch(r"blendhub_fleet_\w+_bytes_total", name)} == set()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@needs_prometheus
@needs_redis
def test_no_query_of_the_dashboard_or_of_an_alert_is_empty(tmp_path):
    texts, endpoint, metrics = Texts(1), f"ipc://{tmp_path}/hub.sock", f"127.0.0.1:{free_port()}"
    (tmp_path / "shared").mkdir()
    settings = {"endpoint": endpoint, "audit_share": 0.3, "policy": {"min_donor_context": 0, "min_reused_tokens": 64}}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 2048}
    with contextlib.ExitStack() as closing:
        redis = closing.enter_context(RedisServer())
        shared = StoreChoice("shared_directory", {"path": str(tmp_path / "shared"), "catalogue": redis.url})
        config = HubConfig(arena_gib=0.008, metrics=metrics, listen=(Listen(endpoint=endpoint),), store=shared)
        closing.enter_context(HubInThread(config))
        model = make_tiny_model(tmp_path / "tiny")
        server = closing.enter_context(Server(model, tmp_path / "log", transfer_config(settings), **options))
        server.wait_until_up()
        jobs = {"blendhub": [metrics], "vllm": [f"127.0.0.1:{server.port}"]}
        prometheus = closing.enter_context(Prometheus(jobs, rules=[ALERTS]))

        def has_value(query: str) -> bool:
            return any(math.isfinite(float(series["value"][1])) for series in prometheus.query(query))

        documents = [texts.new(400) for _ in range(40)]
        empty = [*queries(), *re.findall(r"(?:vllm:|\b)blendhub_\w+|vllm:\w+", ALERTS.read_text())]
        until = time.monotonic() + SHOWN_S
        while empty and time.monotonic() < until:
            prompts = [[*texts.new(40), *document, *texts.new(9)] for document in documents]
            for prompt in [*prompts, [*documents[0], *documents[1]]]:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
            empty = [query for query in empty if not has_value(query)]
        assert empty == [], server.log[-2000:]
        assert prometheus.query('up == 0 or ALERTS{alertstate="firing"}') == []
