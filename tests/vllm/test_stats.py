"""What the adapter counts, on its way to vLLM's log and metrics endpoint."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

import prometheus_client
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

import blendhub.vllm
from blendhub.vllm.plugin import register
from blendhub.vllm.stats import COUNTERS, LABELLED, BlendHubMetrics, BlendHubStats

register()
counts = st.dictionaries(st.sampled_from([*COUNTERS, *(f"{start}why" for start in LABELLED)]), st.integers(0, 9))


def counted_in_code() -> tuple[set[str], set[str]]:
    """The names of counters in the adapter's code: whole ones, and the beginnings of those that end with a reason."""
    whole, beginnings = set(), set()
    for file in Path(blendhub.vllm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Subscript):
                continue
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if owner not in ("counters", "_unserved"):
                continue
            if isinstance(node.slice, ast.JoinedStr):
                beginnings.add(node.slice.values[0].value)
            else:
                whole |= {part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant)}
    return whole, beginnings


def test_everything_that_is_counted_has_a_metric_and_every_metric_is_counted():
    whole, beginnings = counted_in_code()
    assert beginnings == set(LABELLED)
    assert {name for name in whole if not name.startswith(tuple(LABELLED))} == set(COUNTERS)


def test_a_counter_belongs_to_one_metric():
    names = [*COUNTERS, *LABELLED]
    assert not any(one.startswith(start) for one in names for start in LABELLED if one != start)
    metrics = [*COUNTERS, *(metric for metric, _ in LABELLED.values())]
    assert len(metrics) == len(set(metrics))


@given(st.lists(counts, max_size=5))
def test_every_count_is_taken_once(steps):
    counters: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for step in steps:
        counters.update(step)
        stats = BlendHubStats.taken_from(counters)
        assert (stats is None) == (not any(step.values()))
        taken.update(stats.data if stats else {})
        assert BlendHubStats.taken_from(counters) is None
    assert +taken == +sum(map(Counter, steps), Counter())


@given(st.lists(counts, min_size=1, max_size=4))
def test_stats_add_up(parts):
    whole = BlendHubStats()
    assert whole.is_empty()
    for part in parts:
        whole = whole.aggregate(BlendHubStats(dict(part)))
    assert Counter(whole.reduce()) == sum(map(Counter, parts), Counter())
    assert whole.is_empty() == (not any(parts))
    assert list(whole.reduce()) == sorted(whole.data)
    whole.reset()
    assert whole.is_empty()


# In vLLM's own hands.


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both"))


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def metrics(config, registry) -> KVConnectorProm:
    """As the server makes them, but for a registry of their own."""

    class Counted(prometheus_client.Counter):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, registry=registry)

    class Metrics(KVConnectorProm):
        _counter_cls = Counted

    return Metrics(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_every_counter_reaches_prometheus_by_engine(metrics, registry):
    assert isinstance(metrics.prom_metrics, BlendHubMetrics)
    for name in COUNTERS:
        for engine, count in ((0, 2), (1, 3), (0, 4)):
            metrics.observe({name: count}, engine)
    for name, about in COUNTERS.items():
        for engine, count in (("0", 6), ("1", 3)):
            labels = {"model_name": "m", "engine": engine}
            assert registry.get_sample_value(f"vllm:blendhub_{name}_total", labels) == count
        assert f"# HELP vllm:blendhub_{name}_total {about}" in prometheus_client.generate_latest(registry).decode()


def test_reasons_become_labels(metrics, registry):
    for start, (name, _) in LABELLED.items():
        metrics.observe({f"{start}HubError": 2, f"{start}Busy": 1})
        for reason, count in (("HubError", 2), ("Busy", 1)):
            labels = {"model_name": "m", "engine": "0", "reason": reason}
            assert registry.get_sample_value(f"vllm:blendhub_{name}_total", labels) == count


def test_vllm_s_log_tells_the_sum_of_an_interval(config):
    log = KVConnectorLogging(config.kv_transfer_config)
    lines = []
    for step in ({"tokens_exact": 5}, {"tokens_exact": 2, "refused_off": 1}):
        log.observe(step)
    log.log(lambda *words: lines.append(words))
    log.log(lambda *words: lines.append(words))
    assert lines == [("KV Transfer metrics: %s", "refused_off=1, tokens_exact=7")]
