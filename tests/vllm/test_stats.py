"""What the adapter counts, on its way to vLLM's log and metrics endpoint."""

import itertools
from collections import Counter
from typing import Any

import msgspec
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from blendhub.vllm.plugin import register
from blendhub.vllm.watching.metrics import BANDS, COUNTERS, LABELLED, ratio_band
from blendhub.vllm.watching.stats import FIRST_TOKEN, AuditRecord, BlendHubStats, Times

register()
counts = st.dictionaries(st.sampled_from([*COUNTERS, *(f"{start}why" for start in LABELLED)]), st.integers(0, 9))


@given(st.lists(st.tuples(counts, st.lists(st.integers(1, 99), max_size=4)), max_size=5))
def test_every_count_and_every_time_is_taken_once_and_adds_up(steps):
    counters, times, whole = Counter[str](), Times(), BlendHubStats()
    for counted, eighths in steps:
        seconds = [eighth / 8 for eighth in eighths]
        counters.update(counted)
        times.add("load_seconds", *seconds)
        stats = BlendHubStats.taken_from(counters, times)
        assert (stats is None) == (not any(counted.values()) and not seconds)
        whole = whole.aggregate(stats or BlendHubStats())
        assert BlendHubStats.taken_from(counters, times) is None
    sums: dict[str, float] = dict(sum((Counter(counted) for counted, _ in steps), Counter[str]()))
    if any(eighths for _, eighths in steps):
        sums["load_seconds"] = sum(sum(eighths) for _, eighths in steps) / 8
    assert whole.reduce() == sums and list(whole.reduce()) == sorted(whole.data)
    whole.reset()
    assert whole.is_empty()


# In vLLM's own hands.

AUDITED = [
    AuditRecord("one", 0.15, True, 0.001, 0.9),
    AuditRecord("one", 0.11, False, 2.0, 0.9),
    AuditRecord("one", 0.5, True, 0.0, 0.9),
    AuditRecord("two", 0.0, True, 0.2, 0.75),
]


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both"))


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def metrics(config, registry) -> KVConnectorProm:
    """Metrics as the server makes them, but in a registry of their own."""

    def of_registry(kind: Any) -> Any:
        def made(self, *arguments, **options):
            kind.__init__(self, *arguments, **options | {"registry": registry})

        return type(kind.__name__, (kind,), {"__init__": made})

    class Metrics(KVConnectorProm):
        _counter_cls = of_registry(prometheus_client.Counter)
        _gauge_cls = of_registry(prometheus_client.Gauge)
        _histogram_cls = of_registry(prometheus_client.Histogram)

    return Metrics(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_counters_and_times_reach_prometheus_by_engine_and_the_ends_of_names_become_labels(metrics, registry):
    def value(name, engine, **labels):
        return registry.get_sample_value(f"vllm:blendhub_{name}", {"model_name": "m", "engine": engine, **labels})

    for engine, name in itertools.product("01", [*(f"{name}_total" for name in COUNTERS), "load_seconds_count"]):
        assert value(name, engine) == 0, "shown from the start"
    for number, count in ((0, 2), (1, 3), (0, 4)):
        metrics.observe(dict.fromkeys(COUNTERS, count), number)
    for name in COUNTERS:
        assert (value(f"{name}_total", "0"), value(f"{name}_total", "1")) == (6, 3)
    for start, (name, label, _) in LABELLED.items():
        metrics.observe({f"{start}HubError": 2, f"{start}Busy": 1})
        assert [value(f"{name}_total", "0", **{label: reason}) for reason in ("HubError", "Busy")] == [2, 1]
    metrics.observe({"load_seconds": [0.25, 0.5, 2.0], f"{FIRST_TOKEN}_blended": [0.5]}, 1)
    assert (value("load_seconds_count", "1"), value("load_seconds_sum", "1")) == (3, 2.75)
    assert value("load_seconds_bucket", "1", le="0.5") == 2
    assert value(f"{FIRST_TOKEN}_sum", "1", reuse="blended") == 0.5


def test_audits_are_counted_by_namespace_and_ratio_and_in_vllm_s_log_together(metrics, registry):
    stats = BlendHubStats()
    for audit in AUDITED:
        stats = stats.aggregate(BlendHubStats.taken_from(Counter(tokens_moved=2), audits=[audit]))
    assert stats.reduce() == {"audit_disagreements": 1, "audits": 4, "tokens_moved": 8}
    # As it crosses to another process.
    metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)), 0)

    def values(namespace, band):
        labels = {"model_name": "m", "engine": "0", "namespace": namespace, "ratio": band}
        names = ("audits_total", "audit_disagreements_total", "audit_kl_count", "audit_kl_sum")
        return [registry.get_sample_value(f"vllm:blendhub_{name}", labels) for name in names]

    assert values("one", "0.1-0.15") == [2, 1, 2, 2.001] and values("one", "0.3-0.5") == [1, 0, 1, 0.0]
    assert values("two", "0") == [1, 0, 1, 0.2] and values("two", "0.1-0.15") == [None] * 4
    for namespace, expected in (("one", 0.9), ("two", 0.75)):
        labels = {"model_name": "m", "engine": "0", "namespace": namespace}
        assert registry.get_sample_value("vllm:blendhub_expected_agreement_ratio", labels) == expected


def test_every_ratio_has_one_of_a_few_labels():
    labels = [ratio_band(n / 1000) for n in range(1001)]
    assert len(dict.fromkeys(labels)) == len(BANDS) and labels == sorted(labels, key=list(dict.fromkeys(labels)).index)
    for low, high in itertools.pairwise(BANDS):
        assert {ratio_band(low + 1e-9), ratio_band(high)} == {f"{low:g}-{high:g}"}
