"""The dashboard and the alerts over a real hub of a fleet and a real engine, scraped by a real Prometheus."""

import contextlib
import math
import re
import subprocess
import sys
import time

import httpx
import pytest

from harness.engines import Server
from harness.engines.engine import transfer_config
from harness.servers.prometheus import Prometheus, needs_prometheus
from harness.servers.redis_server import RedisServer, needs_redis
from harness.waiting import free_port, wait_until
from tests.dashboard import ALERTS, queries

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900), needs_prometheus, needs_redis]
SHOWN_S = 240.0
"""How long the traffic goes on until every query has a value: some need evictions, audits and reads from the store."""


@contextlib.contextmanager
def hub_of_a_fleet(folder, redis):
    """A hub with a small arena; yields its endpoint and the address of its metrics."""
    endpoint, metrics = f"ipc://{folder}/hub.sock", f"127.0.0.1:{free_port()}"
    config = folder / "hub.toml"
    config.write_text(f'metrics = "{metrics}"\narena_gib = 0.008\n')
    store = ("--store", "shared_directory", "--store-option", f"catalogue={redis.url}")
    command = [sys.executable, "-m", "blendhub.cli", "serve", "--config", config, "--endpoint", endpoint, *store]
    process = subprocess.Popen([*command, "--store-option", f"path={folder}/shared"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: httpx.get(f"http://{metrics}/healthz", timeout=10).raise_for_status(), 60)
        yield endpoint, metrics
    finally:
        process.terminate()
        process.wait(60)


def test_no_query_of_the_dashboard_is_empty(model, tmp_path, texts):
    with contextlib.ExitStack() as closing:
        (tmp_path / "shared").mkdir()
        redis = closing.enter_context(RedisServer())
        endpoint, metrics = closing.enter_context(hub_of_a_fleet(tmp_path, redis))
        settings = {"endpoint": endpoint, "audit_share": 0.3, "policy": {"max_recompute_share": 1.0}}
        config = transfer_config(settings)
        server = Server(model, tmp_path / "log", config, skip_tokenizer_init=True, max_model_len=2048)
        closing.enter_context(server)
        server.wait_until_up()
        jobs = {"blendhub": [metrics], "vllm": [f"127.0.0.1:{server.port}"]}
        prometheus = closing.enter_context(Prometheus(jobs, rules=[ALERTS]))
        documents = [texts.new(400) for _ in range(40)]
        empty = [*queries(), *re.findall(r"(?:vllm:|\b)blendhub_\w+|vllm:\w+", ALERTS.read_text())]
        until = time.monotonic() + SHOWN_S
        while empty and time.monotonic() < until:
            for prompt in [
                *([*texts.new(40), *document, *texts.new(9)] for document in documents),
                [*documents[0], *documents[1]],
            ]:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
            empty = [query for query in empty if not has_value(prometheus, query)]
        assert empty == [], server.log[-2000:]
        assert prometheus.query('up == 0 or ALERTS{alertstate="firing"}') == []


def has_value(prometheus, query):
    return any(math.isfinite(float(series["value"][1])) for series in prometheus.query(query))
