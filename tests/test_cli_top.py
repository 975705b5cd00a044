"""What `blendhub top` makes of the hub's numbers."""

import pytest

from blendhub.cli import main
from blendhub.cli.top import Sample, View
from blendhub.client.wire import HubStats


def sample(at: float, epoch: int = 1, **counters: float) -> Sample:
    gauges = {"seconds_lookup_p50": 25e-6, "seconds_lookup_p99": 0.5}
    return Sample(at, HubStats(epoch=epoch, counters=counters, gauges=gauges, namespaces={}))


def test_rates_are_between_two_samples():
    before = sample(10.0, requests_lookup=10, lookups_that_found=5, tokens_exact=100)
    now = sample(12.0, requests_lookup=20, lookups_that_found=15, tokens_exact=400, tokens_moved=30, refused_Busy=2)
    rows = dict(View(now, before).rows())
    assert rows["lookups"] == "20 (5/s), hit rate 75%"
    assert rows["exact"] == "400 tokens (150/s)" and rows["moved"] == "30 tokens (15/s)"
    assert rows["refused"] == "2 Busy"
    assert View(now, before).latencies() == [("lookup", "20 (5/s)", "25 us", "500 ms")]
    assert dict(View(now).rows())["exact"] == "400 tokens"


def test_the_fleet_is_shown_where_there_is_one():
    def fleet(**gauges):
        counters = {"fleet_fetched_bytes": 2**21, "fleet_sent_bytes": 2**20, "fleet_failures": 2, "store_failures": 1}
        stats = HubStats(epoch=1, counters=dict[str, float](counters), gauges=gauges, namespaces={})
        return dict(View(Sample(1.0, stats)).rows())

    assert "fleet" not in fleet(chunks=5)
    seen = {"fleet_hubs": 3, "fleet_behind": 40, "chunks": 1000, "chunks_in_arena": 100}
    assert fleet(**seen, fleet_in_step=1)["fleet"] == (
        "3 hubs, 40 changes behind, 100 chunks here, 900 elsewhere, 2 MiB fetched, 1 MiB sent, 3 failures"
    )
    assert fleet(**seen, fleet_in_step=0)["fleet"].startswith("does not answer, ")


def test_a_hub_that_was_restarted_has_no_rate_and_an_idle_one_no_hit_rate():
    before = sample(1.0, requests_lookup=9, tokens_exact=9)
    rows = dict(View(sample(2.0, epoch=2, tokens_exact=10), before).rows())
    assert rows["lookups"] == "0, hit rate -" and rows["exact"] == "10 tokens"


def test_agreement_is_that_of_the_last_audits_with_its_interval():
    def agreement(**namespaces):
        stats = HubStats(epoch=1, counters={}, gauges={}, namespaces=namespaces)
        return dict(View(Sample(1.0, stats)).rows())["agreement"]

    idle = {"audits": 0, "recent_audits": 0, "recent_audit_disagreements": 0}
    busy = {"audits": 900, "recent_audits": 100, "recent_audit_disagreements": 10}
    other = {"audits": 4, "recent_audits": 4, "recent_audit_disagreements": 0}
    assert agreement() == agreement(a=idle) == "no request was audited"
    assert agreement(a=idle, b=busy) == "90.0% (95%: 82.6% to 94.5%) of 100 recent audits"
    assert agreement(aaaaaaaa=busy, bbbbbbbb=other).startswith("aaaaaa 90.0% (95%: 82.6% to 94.5%) of 100 recent")
    assert "bbbbbb 100.0% (95%: 51.0% to 100.0%) of 4 recent audits" in agreement(aaaaaaaa=busy, bbbbbbbb=other)


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--interval", "0"], "--interval 0.0 should be"),
        (["--interval", "nan"], "--interval nan should be"),
        (["--options", "{"], "--options '{' is not a JSON object"),
        (["--endpoint", "tcp://far.example:1"], "so it needs keys"),
        ([], "no hub at ipc://"),
    ],
)
def test_what_top_cannot_show_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, flags, complaint):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["top", "--once", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and complaint in error and error.count("\n") == 1
