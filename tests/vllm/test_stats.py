"""What the adapter counts, on its way to vLLM's log and metrics endpoint."""

import ast
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

import blendhub.vllm
from blendhub.vllm.plugin import register
from blendhub.vllm.watching.metrics import BANDS, COUNTERS, LABELLED, SECONDS, ratio_band
from blendhub.vllm.watching.stats import AUDITS, FIRST_TOKEN, AuditRecord, BlendHubStats, Times
from harness.servers.prometheus import needs_prometheus, promtool
from tests.metric_names_of_vllm import OF_ENGINE

register()
counts = st.dictionaries(st.sampled_from([*COUNTERS, *(f"{start}why" for start in LABELLED)]), st.integers(0, 9))


def counted_in_code() -> tuple[set[Any], set[Any]]:
    """The names of counters in the adapter's code: whole ones, and the beginnings of those that end with a reason."""
    whole, beginnings = set(), set()
    for file in Path(blendhub.vllm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("counts_of"):
                keys = [key for part in ast.walk(node) if isinstance(part, ast.Dict) for key in part.keys]
                whole |= {part.value for key in keys for part in ast.walk(key) if isinstance(part, ast.Constant)}
            if not isinstance(node, ast.Subscript):
                continue
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if owner not in ("counters", "_counters", "_unserved"):
                continue
            if isinstance(node.slice, ast.JoinedStr) and isinstance(beginning := node.slice.values[0], ast.Constant):
                beginnings.add(beginning.value)
            else:
                whole |= {part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant)}
    return whole, beginnings


def test_everything_that_is_counted_has_a_metric_and_every_metric_is_counted():
    whole, beginnings = counted_in_code()
    assert beginnings == set(LABELLED)
    assert {name for name in whole if not name.startswith(tuple(LABELLED))} == set(COUNTERS)


seconds = st.lists(st.sampled_from([0.001, 0.25, 8.0]), max_size=4)


@given(st.lists(st.tuples(counts, seconds), max_size=5))
def test_every_count_and_every_time_is_taken_once(steps):
    counters, times = Counter[str](), Times()
    taken, taken_s = Counter[str](), list[float]()
    for counted, timed in steps:
        counters.update(counted)
        times.add("load_seconds", *timed)
        stats = BlendHubStats.taken_from(counters, times)
        assert (stats is None) == (not any(counted.values()) and not timed)
        data = dict(stats.data) if stats else {}
        taken_s += data.pop("load_seconds", [])
        taken.update(data)
        assert BlendHubStats.taken_from(counters, times) is None
    assert +taken == +sum((Counter(counted) for counted, _ in steps), Counter())
    assert taken_s == [second for _, timed in steps for second in timed]


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

    class Counted(prometheus_client.Counter):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options | {"registry": registry})

    class Spread(prometheus_client.Histogram):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options | {"registry": registry})

    class Shown(prometheus_client.Gauge):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options | {"registry": registry})

    class Metrics(KVConnectorProm):
        _counter_cls = Counted
        _gauge_cls = Shown
        _histogram_cls = Spread

    return Metrics(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_every_counter_reaches_prometheus_by_engine_and_the_ends_of_names_become_labels(metrics, registry):
    value = registry.get_sample_value
    for engine_label, name in itertools.product(
        "01", [*(f"{name}_total" for name in COUNTERS), *(f"{name}_count" for name in SECONDS)]
    ):
        assert value(f"vllm:blendhub_{name}", {"model_name": "m", "engine": engine_label}) == 0, "shown from the start"
    for name in COUNTERS:
        for engine, count in ((0, 2), (1, 3), (0, 4)):
            metrics.observe({name: count}, engine)
    for name, about in COUNTERS.items():
        for engine, count in ((0, 6), (1, 3)):
            labels = {"model_name": "m", "engine": str(engine)}
            assert value(f"vllm:blendhub_{name}_total", labels) == count
        assert f"# HELP vllm:blendhub_{name}_total {about}" in prometheus_client.generate_latest(registry).decode()
    for start, (name, label, _) in LABELLED.items():
        metrics.observe({f"{start}HubError": 2, f"{start}Busy": 1})
        for reason, count in (("HubError", 2), ("Busy", 1)):
            labels = {"model_name": "m", "engine": "0", label: reason}
            assert value(f"vllm:blendhub_{name}_total", labels) == count


def test_times_become_histograms_by_engine(metrics, registry):
    stats = BlendHubStats({"load_seconds": [0.25]}).aggregate(BlendHubStats({"load_seconds": [0.5, 2.0]}))
    assert stats.reduce() == {"load_seconds": 2.75}
    metrics.observe({**stats.data, f"{FIRST_TOKEN}_blended": [0.5]}, 1)
    labels = {"model_name": "m", "engine": "1"}
    value = registry.get_sample_value
    assert value("vllm:blendhub_load_seconds_count", labels) == 3
    assert value("vllm:blendhub_load_seconds_sum", labels) == 2.75
    assert value("vllm:blendhub_load_seconds_bucket", labels | {"le": "0.5"}) == 2
    assert value(f"vllm:blendhub_{FIRST_TOKEN}_sum", labels | {"reuse": "blended"}) == 0.5


@needs_prometheus
def test_promtool_complains_of_nothing_but_the_colon_that_all_of_vllm_s_metrics_have(metrics, registry):
    metrics.observe(BlendHubStats.taken_from(Counter(refused_off=1), audits=AUDITED).data)
    metrics.observe({name: [0.1] for name in (*SECONDS, f"{FIRST_TOKEN}_none")})
    page = prometheus_client.generate_latest(registry).decode()
    page = re.sub(r"^.*vllm:blendhub_\w+_created.*\n", "", page, flags=re.M)
    checked = promtool("check", "metrics", given=page)
    complaints = (checked.stdout + checked.stderr).splitlines()
    assert complaints and all(re.fullmatch(r"vllm:\S+ metric names should not contain ':'", one) for one in complaints)
    shown = dict(re.findall(r"^# HELP vllm:blendhub_(\w+) (.*)$", page, re.M))
    assert shown.items() <= OF_ENGINE.items()


def test_vllm_s_log_tells_the_sum_of_an_interval(config):
    log = KVConnectorLogging(config.kv_transfer_config)
    lines = []
    for step in ({"tokens_exact": 5}, {"tokens_exact": 2, "refused_off": 1, "load_seconds": [0.25, 0.5]}):
        log.observe(step)
    log.log(lambda *words: lines.append(words))
    log.log(lambda *words: lines.append(words))
    assert lines == [("KV Transfer metrics: %s", "load_seconds=0.75, refused_off=1, tokens_exact=7")]


def test_audits_are_counted_by_namespace_ratio_and_in_vllm_s_log_together(metrics, registry):
    stats = BlendHubStats()
    for one in AUDITED:
        stats = stats.aggregate(BlendHubStats.taken_from(Counter(tokens_moved=2), audits=[one]))
    assert stats.reduce() == {"audit_disagreements": 1, "audits": 4, "tokens_moved": 8}
    # As it crosses to another process.
    metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)), 0)
    labels = {"model_name": "m", "engine": "0"}
    of = {
        (namespace, band): [
            registry.get_sample_value(f"vllm:blendhub_{name}", labels | {"namespace": namespace, "ratio": band})
            for name in ("audits_total", "audit_disagreements_total", "audit_kl_count", "audit_kl_sum")
        ]
        for namespace, band in (
            ("one", "0.1-0.15"),
            ("one", "0.3-0.5"),
            ("two", "0"),
            ("two", "0.1-0.15"),
        )
    }
    assert of == {
        ("one", "0.1-0.15"): [2, 1, 2, 2.001],
        ("one", "0.3-0.5"): [1, 0, 1, 0.0],
        ("two", "0"): [1, 0, 1, 0.2],
        ("two", "0.1-0.15"): [None] * 4,
    }
    assert registry.get_sample_value("vllm:blendhub_tokens_moved_total", labels) == 8
    for namespace, expected in (("one", 0.9), ("two", 0.75)):
        of_namespace = labels | {"namespace": namespace}
        assert registry.get_sample_value("vllm:blendhub_expected_agreement_ratio", of_namespace) == expected
    assert AUDITS not in BlendHubStats.taken_from(Counter(saved_tokens=1)).data


def test_every_ratio_has_one_of_a_few_labels():
    labels = [ratio_band(n / 1000) for n in range(1001)]
    assert len(dict.fromkeys(labels)) == len(BANDS) and labels == sorted(labels, key=list(dict.fromkeys(labels)).index)
    for low, high in itertools.pairwise(BANDS):
        assert {ratio_band(low + 1e-9), ratio_band(high)} == {f"{low:g}-{high:g}"}
