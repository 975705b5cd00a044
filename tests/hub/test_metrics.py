"""The text of `/metrics`: every number has a meaning, a type and a name that follow Prometheus' conventions."""

import re

import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.hub.http.metrics import exposition
from blendhub.outcome.agreement import wilson
from harness.servers.prometheus import needs_prometheus, promtool
from tests.hub.hub_direct import CHUNK, tokens
from tests.metric_names import OF_HUB
from tests.outcomes import audited


@pytest.fixture
def page(make_hub, tmp_path) -> str:
    """The metrics of a hub that has read from its store, was told of audits, and has refused a request."""
    hub = make_hub(2, tmp_path)
    member = hub.join()
    for seed in range(3):
        member.store(tokens(seed, CHUNK))
        hub.settle()
    member.lookup(tokens(0, CHUNK), wait_s=5.0)
    member.ask(wire.Reported, outcomes=audited(True, True, True, False))
    with pytest.raises(InvalidInput):
        member.ask(wire.Lookup, [b"", b""])
    return exposition(hub.service.stats(), hub.service.counters).decode()


def value(page: str, series: str) -> float:
    (found,) = re.findall(rf"^blendhub_{series} (\S+)$", page, re.M)
    return float(found)


@needs_prometheus
def test_promtool_finds_nothing_to_complain_of(page):
    checked = promtool("check", "metrics", given=page)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_number_has_a_meaning(page):
    shown = dict(re.findall(r"^# HELP blendhub_(\w+) (.*)$", page, re.M))
    # This hub is alone.
    assert shown == {name: about for name, about in OF_HUB.items() if not name.startswith("fleet_")}


def test_times_are_histograms(page):
    assert value(page, r'request_seconds_bucket\{kind="lookup",le="\+Inf"\}') == 1
    assert value(page, r'store_read_seconds_bucket\{le="\+Inf"\}') == 1 == value(page, "store_loads_total")
    assert 0 < value(page, "store_read_seconds_sum") < 10


def test_the_share_of_audits_that_agreed_has_its_interval(page):
    label = r'\{namespace="\w+"\}'
    ends = [value(page, f"namespace_agreement_{end}ratio{label}") for end in ("", "low_", "high_")]
    assert ends == [0.75, *wilson(3, 4)]
