"""A plugin's own fault is blamed on the plugin, and only on it."""

import asyncio
import logging

import numpy as np
import pytest

from blendhub import Span
from blendhub.contracts import RunKey, Selection
from blendhub.core.errors import InvalidInput, PluginError
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)

TOKENS = np.arange(64, dtype=np.uint32)
KV = (np.zeros((1, 1, 1)),) * 2

FAULTY = """
    import msgspec
    from blendhub import PluginSpec, hookimpl
    from blendhub.contracts import Device, Matcher, Selector, Store, Transfer, Transport
    from blendhub.core.errors import InvalidInput
    from blendhub.testing import ReferenceMatcher

    class Options(msgspec.Struct):
        can_list: bool = False

    class FaultyMatcher(ReferenceMatcher):
        def find(self, tokens):
            if len(tokens) == 7:
                raise InvalidInput("seven is refused on purpose")
            return sorted([(1, 2), None])

        @property
        def nbytes(self):
            return {}["nbytes"]

        def __len__(self):
            return len(None)

    class FaultySelector(Selector):
        __slots__ = ()
        probe_layer = 1

        def __setattr__(self, name, value):
            raise AttributeError("frozen")

        def deviation(self, fresh, stored):
            return fresh / 0

        def pick(self, selection):
            return [1 / selection.ratio]

    class LateTransfer(Transfer):
        def done(self):
            return True

        def wait(self):
            raise OSError("the card fell off")

    class FaultyDevice(Device):
        block_tokens = 1

        def attach(self, layers, block_size, layout): ...
        def pin(self, arena, progress=None):
            arena.no_such_attribute
        def load(self, segments, block_ids, skip_prefix_n_tokens=0):
            return LateTransfer()
        save = load
        def close(self): ...

    class FaultyStore(Store):
        nbytes = capacity = corrupted = 0

        def __init__(self, can_list):
            self.can_list = can_list
        def write_run(self, run):
            return []
        def write(self, run, span, shards):
            raise KeyError(run.run[:0])
        def read(self, run, span, into): ...
        def discard(self, run, span): ...
        def runs(self):
            yield from ()
            if not self.can_list:
                raise ZeroDivisionError("in mid-iteration")
        def close(self): ...

    class FaultyTransport(Transport):
        schemes = ("faulty://",)

        async def serve(self, endpoint, service):
            raise RuntimeError("no door")
        def connect(self, endpoint, codec):
            raise RuntimeError("no cable")

    def spec(factory):
        return [PluginSpec(name="faulty", api=4, summary="", factory=factory, options=Options)]

    @hookimpl
    def blendhub_matchers():
        return spec(lambda options: FaultyMatcher("anywhere", 1))

    @hookimpl
    def blendhub_selectors():
        return spec(lambda options: FaultySelector())

    @hookimpl
    def blendhub_devices():
        return spec(lambda options: FaultyDevice())

    @hookimpl
    def blendhub_stores():
        return spec(lambda options: FaultyStore(options.can_list))

    @hookimpl
    def blendhub_transports():
        return spec(lambda options: FaultyTransport())
"""


def selection(ratio):
    return Selection([Span(0, 1)], ratio, scores=np.zeros(1, np.float32))


CALLS = {
    "selector.pick": (lambda made: made.select(selection(0)), "ZeroDivisionError"),
    "selector.select": (
        lambda made: made.select(selection(1)),
        "it should return a list of Span of int, got [1.0]",
    ),
    "selector.deviation": (lambda made: made.score(KV, KV), "TypeError: unsupported operand type(s) for /"),
    "matcher.find": (lambda made: made.match(TOKENS[:1]), "TypeError: '<' not supported"),
    "matcher.nbytes": (lambda made: made.nbytes, "KeyError: 'nbytes'"),
    "matcher.__len__": (len, "TypeError: object of type 'NoneType' has no len"),
    "device.pin": (lambda made: made.pin(np.zeros(4, np.uint8)), "AttributeError"),
    "device.wait": (lambda made: made.load([], []).wait(), "OSError: the card fell off"),
    "store.write": (lambda made: made.save(RunKey("n", "r"), Span(0, 1), [b"1"]), "KeyError"),
    "store.runs": (lambda made: list(made.runs()), "ZeroDivisionError: in mid-iteration"),
    "transport.connect": (lambda made: made.connect("faulty://", None), "RuntimeError: no cable"),
    "transport.serve": (lambda made: asyncio.run(made.serve("faulty://", None)), "RuntimeError: no door"),
}


@pytest.fixture
def host(site):
    site.install("faulty-things", FAULTY, version="0.7")
    return site.host()


@pytest.mark.parametrize("where", CALLS)
def test_an_error_of_a_plugin_s_code_names_plugin_distribution_and_method(host, where):
    kind, method = where.split(".")
    call, error = CALLS[where]
    with pytest.raises(PluginError) as caught:
        call(host.create(kind, "faulty"))
    assert str(caught.value).startswith(f"{kind} 'faulty' of faulty-things 0.7 failed in {method}: {error}")
    assert caught.value.__cause__ is not None


def test_what_the_contract_lets_a_method_raise_goes_through_as_it_is(host):
    with pytest.raises(InvalidInput, match=r"^seven is refused on purpose$"):
        host.create("matcher", "faulty").match(TOKENS[:7])


def test_the_traceback_is_logged_once(host, caplog, monkeypatch):
    monkeypatch.setattr("blendhub.contracts.plugin_errors._logged", set())
    selector = host.create("selector", "faulty")
    with caplog.at_level(logging.ERROR, logger="blendhub"):
        for _ in range(3):
            with pytest.raises(PluginError):
                selector.select(selection(0))
    assert sum("ZeroDivisionError" in (record.exc_text or "") for record in caplog.records) == 1


def test_a_matcher_s_fault_reaches_the_engine_with_the_matcher_s_name(host):
    space = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("faulty"),))
    with HubInThread(HubConfig(arena_gib=0.01, metrics="")) as hub, hub.connect() as client:
        client.register("e", space, 0)
        # A lookup where nothing is stored needs no matcher.
        client.commit(client.reserve(TOKENS, Span(0, 64)).right, 64)
        with pytest.raises(PluginError, match=r"^matcher 'faulty' of faulty-things 0.7 failed in find: TypeError"):
            client.lookup(TOKENS)
