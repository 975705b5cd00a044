"""Plugins of a stranger, installed beside BlendHub and picked by name, do their work inside of vLLM."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.waiting import wait_until
from tests.conftest import Site
from tests.test_template import install_template
from tests.vllm.conftest import ROUNDING, SETTINGS, TOLERANCE, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 10.0
CHOSEN = SETTINGS | {
    "matchers": [{"name": "ngram", "options": {"window_tokens": 16}}],
    "selector": {"name": "edges", "options": {"k": 8}},
    "device": {"name": "plain"},
    "transport": {"name": "zmq", "options": {"max_pending": 64}},
}
FAULTY = """
from blendhub import PluginSpec, hookimpl
from blendhub.contracts import Selector

class Faulty(Selector):
    calls = 0

    def select(self, selection):
        self.calls += 1
        if self.calls <= 2:  # the first call measures what selections cost
            return [(span.start, span.end) for span in selection.moved]
        return sorted([*selection.moved, (0, 1)])

@hookimpl
def blendhub_selectors():
    return [PluginSpec(name="faulty", api=1, summary="", factory=Faulty)]
"""

SLOW = """
import time
from blendhub import PluginSpec, hookimpl
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice

class Slow(CpuDevice):
    def _load(self, segments, block_ids, group):
        time.sleep(1e-3 * sum(len(segment.span) for segment in segments))
        return super()._load(segments, block_ids, group)

@hookimpl
def blendhub_devices():
    return [PluginSpec(name="slow", api=1, summary="", factory=Slow, options=CpuOptions)]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    site = install_template(folder)
    Site(site).install("faulty-selectors", FAULTY, version="0.7")
    Site(site).install("slow-devices", SLOW)
    reports, kept = str(folder / "reports.jsonl"), str(folder / "store")
    return {"PYTHONPATH": str(site), "BLENDHUB_REPORTS": reports, "STORE": kept}


@pytest.fixture(scope="module")
def engine(model, environment):
    disk = {"name": "disk", "options": {"path": environment["STORE"]}}
    with Engine(model, CHOSEN | {"hub": SETTINGS["hub"] | {"store": disk}}, variables=environment) as engine:
        yield engine


def test_the_engine_reaches_its_own_hub_by_the_chosen_transport_and_the_chosen_store_keeps_its_kv(
    engine, environment, texts
):
    """Though the two share a process, this transport has a socket."""

    def kept():
        return sum(file.stat().st_size for file in Path(environment["STORE"]).rglob("*.kv"))

    before = kept()
    engine.one(texts.new(1000))
    ends = set()
    for end in Path(f"/proc/{engine.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the engine closes files meanwhile
            ends.add(os.readlink(end))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    states = {at[5] for at in sockets if at[-1].endswith("/hub.sock") and f"socket:[{at[6]}]" in ends}
    assert states == {"01", "03"}, "one listens, others are connected"
    wait_until(lambda: kept() >= before + 3 * 256 * 100, SOON_S)


def test_the_selector_picks_the_device_turns_and_the_observer_sees_every_request(engine, environment, plain, texts):
    """What is picked is the selector's rule; in the first layer, KV depends on the token and its position alone."""
    document = texts.new(200)
    stored = engine.one(document).kv(199)
    engine.forget()
    exact = engine.one(document, store=False)
    assert exact.report["exact_tokens"] == 199 and (exact.kv(199) == stored).all()
    engine.forget()
    prompt = [*texts.new(100), *document, *texts.new(9)]
    blended = engine.one(prompt, recompute_ratio=0.5, store=False, explain=True)
    assert blended.report["spans"]["moved"] == [[100, 300]]
    assert blended.report["spans"]["recomputed"] == [[100, 108], [292, 300]]
    ours, expected = (answer.kv(299)[:, :, 100:] for answer in (blended, plain.one(prompt)))
    for part in (0, 1):
        assert largest_difference(ours[0, part], expected[0, part]) < ROUNDING
    assert (ours[:, 1, 8:192] == stored[:, 1, 8:192]).all()

    def reports():
        return [json.loads(line) for line in Path(environment["BLENDHUB_REPORTS"]).read_text().splitlines()]

    wait_until(lambda: reports()[-1]["prompt_tokens"] == 309, SOON_S)
    first, *_, last = reports()[-3:]
    assert first["prompt_tokens"] == 200 and "nothing of this prompt is stored" in first["reason"]
    assert last["spans"]["moved"] == blended.report["spans"]["moved"]


def test_a_selector_s_fault_is_the_selector_s_and_the_request_is_served(model, plain, texts, environment):
    document = texts.new(200)
    with Engine(model, SETTINGS | {"selector": {"name": "faulty"}}, variables=environment) as engine:
        store(engine, document)
        for fault in (
            "BrokenContract: faulty_selectors.Faulty.select should return a list of Span of int, got [(",
            "TypeError: '<' not supported between",
        ):
            prompt = [*texts.new(100), *document, *texts.new(9)]
            answer = engine.one(prompt, store=False)
            assert fault in answer.report["reason"]
            assert disagreement([answer], [plain.one(prompt)]) < TOLERANCE
            engine.forget()


@pytest.mark.parametrize("device, is_reused", [("slow", False), ("cpu", True)])
def test_what_a_device_loads_slower_than_the_model_computes_it_is_computed(
    model, environment, texts, device, is_reused
):
    """The device takes a millisecond for a token, and the model hardly a tenth of that."""
    by_time = SETTINGS | {"policy": {"min_donor_context": 0}, "device": {"name": device}}
    prompt = texts.new(1500)
    with Engine(model, by_time, variables=environment) as engine:
        store(engine, prompt)
        report = engine.one(prompt, store=False).report
    if is_reused:
        assert report["exact_tokens"] == 1499
    else:
        assert report["exact_tokens"] == 0
        times = re.search(r"about ([\d.]+) ms with reuse up to token 1499, and ([\d.]+) ms without", report["reason"])
        assert float(times[1]) > 1499 > float(times[2])
