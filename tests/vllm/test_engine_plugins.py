"""Plugins of a stranger, installed beside BlendHub and picked by name, do their work inside of vLLM."""

import json
import os
import time
from pathlib import Path

import pytest

from harness.engines import Engine, disagreement, largest_difference
from tests.conftest import Site
from tests.test_template import install_template
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-5
"""float32 computed in another order."""

CHOSEN = SETTINGS | {
    "matchers": [{"name": "ngram", "options": {"window_tokens": 16}}],
    "selector": {"name": "edges", "options": {"k": 8}},
    "device": {"name": "plain"},
    "transport": {"name": "zmq", "options": {"max_pending": 64}},
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    site = install_template(folder)
    Site(site).install("faulty-selectors", FAULTY, version="0.7")
    reports, store = str(folder / "reports.jsonl"), str(folder / "store")
    return {"PYTHONPATH": str(site), "BLENDHUB_REPORTS": reports, "STORE": store}


@pytest.fixture(scope="module")
def engine(model, environment):
    store = {"name": "sqlite", "options": {"path": environment["STORE"]}}
    with Engine(model, CHOSEN | {"hub": SETTINGS["hub"] | {"store": store}}, variables=environment) as engine:
        yield engine


def test_the_engine_reaches_its_own_hub_by_the_chosen_transport(engine, texts):
    """Without a choice the two, which share a process, use no socket."""
    engine.one(texts.new(100))
    ends = {os.readlink(end) for end in Path(f"/proc/{engine.pid}/fd").iterdir()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    states = {at[5] for at in sockets if at[-1].endswith("/hub.sock") and f"socket:[{at[6]}]" in ends}
    assert states == {"01", "03"}, "one listens, others are connected"


def test_the_chosen_store_keeps_what_the_engine_stores(engine, environment, texts):
    before = sum(file.stat().st_size for file in Path(environment["STORE"]).iterdir())
    engine.one(texts.new(1000))
    until = time.monotonic() + 10
    while sum(file.stat().st_size for file in Path(environment["STORE"]).iterdir()) < before + 3 * 256 * 100:
        assert time.monotonic() < until, "the store's files do not grow"
        time.sleep(0.05)


def test_what_is_stored_comes_back_as_full_prefill_would_compute_it(engine, plain, texts):
    first, second = texts.new(300), texts.new(150)
    computed = engine.one([*first, *second]).kv(449)
    engine.forget()
    exact = engine.one([*first, *second], store=False)
    assert exact.report["exact_tokens"] == 449 and (exact.kv(449) == computed).all()
    engine.forget()
    prompt = [*second, *texts.new(37), *first, *texts.new(20)]
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 450
    n, expected = len(prompt) - 1, plain.one(prompt)
    assert largest_difference(blended.kv(n), expected.kv(n)) < ROUNDING
    assert disagreement([blended], [expected]) < TOLERANCE


def test_the_selector_picks_and_the_device_turns(engine, plain, texts):
    """What is picked is the selector's rule; in the first layer, KV depends on the token and its position alone."""
    document = texts.new(200)
    stored = engine.one([*texts.new(11), *document, *texts.new(5)]).kv(211)[:, 1, 11:]
    engine.forget()
    prompt = [*texts.new(100), *document, *texts.new(9)]
    blended = engine.one(prompt, recompute_ratio=0.5, store=False, explain=True)
    assert blended.report["spans"]["moved"] == [[100, 300]]
    assert blended.report["spans"]["recomputed"] == [[100, 108], [292, 300]]
    ours, expected = (answer.kv(300)[:, :, 100:] for answer in (blended, plain.one(prompt)))
    for part in (0, 1):
        assert largest_difference(ours[0, part], expected[0, part]) < ROUNDING
    assert (ours[:, 1, 8:192] == stored[:, 8:192]).all()


def test_an_observer_sees_every_request(engine, environment, texts):
    document = texts.new(200)
    engine.one(document)
    engine.forget()
    answer = engine.one([*texts.new(40), *document], explain=True)
    until = time.monotonic() + 10
    while True:
        lines = Path(environment["BLENDHUB_REPORTS"]).read_text().splitlines()
        stored, reused = (json.loads(line) for line in lines[-2:])
        if reused.get("prompt_tokens") == 240:
            break
        assert time.monotonic() < until, lines[-2:]
        time.sleep(0.05)
    assert stored["prompt_tokens"] == 200 and "nothing of this prompt is stored" in stored["reason"]
    assert reused["spans"]["moved"] == answer.report["spans"]["moved"] != []


def test_a_wrong_name_ends_the_start_with_the_right_ones(model, environment):
    with pytest.raises(RuntimeError, match=r"no selector 'edge' \(did you mean 'edges'\?\); installed: att"):
        Engine(model, CHOSEN | {"selector": {"name": "edge"}}, variables=environment)


def test_an_engine_without_a_tokenizer_refuses_an_option_that_is_text(model, environment):
    separator = {"matchers": [{"name": "separator", "options": {"separator": " # # "}}]}
    with pytest.raises(RuntimeError, match="separator is text, and this engine runs without a tokenizer"):
        Engine(model, CHOSEN | separator, variables=environment)


FAULTY = """
from blendhub import PluginSpec, hookimpl
from blendhub.contracts import Selector

class Faulty(Selector):
    calls = 0

    def select(self, selection):
        self.calls += 1
        if self.calls == 1:
            return [(span.start, span.end) for span in selection.moved]
        return sorted([*selection.moved, (0, 1)])

@hookimpl
def blendhub_selectors():
    return [PluginSpec(name="faulty", api=5, summary="", factory=Faulty)]
"""


def test_a_selector_s_fault_is_the_selector_s_and_the_request_is_served(model, plain, texts, environment):
    document = texts.new(200)
    with Engine(model, SETTINGS | {"selector": {"name": "faulty"}}, variables=environment) as engine:
        engine.one(document)
        for fault in (
            "BrokenContract: faulty_selectors.Faulty.select should return a list of Span of int, got [(",
            "TypeError: '<' not supported between",
        ):
            engine.forget()
            prompt = [*texts.new(100), *document, *texts.new(9)]
            answer = engine.one(prompt, store=False)
            assert fault in answer.report["reason"]
            assert disagreement([answer], [plain.one(prompt)]) < TOLERANCE
