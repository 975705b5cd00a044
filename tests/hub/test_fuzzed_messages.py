"""Messages that decode and make no sense, beside an engine that works: each is answered, and the engine notices none.

They are drawn from the types of the messages, so a new message or field is drawn, too. What single messages of the
worst kinds cost stands in test_storing.py, test_match_queues.py and test_memory.py.
"""

import contextlib
import random
from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
from msgspec import inspect

from blendhub.client import wire
from blendhub.core.errors import ArenaFull, BlendHubError
from blendhub.core.layout import Namespace
from blendhub.core.spans import Span
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import CHUNK, ELSEWHERE, STATE_ROWS, DirectHub, namespace, tokens

TEXTS = [tokens(seed, 3 * CHUNK) for seed in range(100, 120)]
NUMBERS = (0, 1, 31, 32, 33, 64, 255, 256, 4096, 4097, 2**16, 2**32, 2**40, 2**62)
NAMESPACES = [
    *(namespace("fuzzed"), namespace("wide", world_size=2), namespace("salted", cache_salt="x")),
    namespace("moving", state_layouts=(STATE_ROWS,), moves_states=True),
]
KINDS = [
    *4 * [wire.Register],
    *6 * [wire.Lookup, wire.Reserve, wire.Commit],
    wire.Preview,
    wire.Stats,
    *[kind for kind in get_args(wire.Request) if issubclass(kind, wire.FromSession)],
]
SPANS = [Span(0, 32), Span(0, 100), Span(5, 96), Span(32, 5000), Span(7, 7), Span(0, 2**40)]
WHOLE: dict[type, list[Any]] = {Namespace: NAMESPACES, ProcessId: [ELSEWHERE], Span: SPANS}


class Fuzzer:
    """A client that sends what it likes, and remembers the ids that the replies to it name."""

    def __init__(self, hub: DirectHub, chance: random.Random, ids: list[int]) -> None:
        self._hub, self._chance, self._ids = hub, chance, ids
        self._sessions: list[int] = []
        self._epoch = hub.state.sessions.epoch
        self.answers: Counter[str] = Counter()

    def send(self) -> None:
        kind = self._chance.choice(KINDS)
        try:
            message = self._drawn(inspect.type_info(kind))
            reply = self._hub.envelope(message, self._payload(), b"fuzzer").message
        except BlendHubError as error:  # any other error would reach the client as ServiceFailed
            self.answers[type(error).__name__] += 1
            return
        self.answers[kind.__name__] += 1
        if isinstance(reply, wire.Registered):
            self._sessions = [*self._sessions[-3:], reply.session]
        learned = (getattr(reply, name, None) for name in ("lease", "run"))
        self._ids = [*self._ids[-30:], *(id for id in learned if id is not None)]

    def _drawn(self, kind: inspect.Type) -> Any:
        chance = self._chance
        if isinstance(kind, inspect.StructType):
            if kind.cls in WHOLE:
                return chance.choice(WHOLE[kind.cls])
            fields = {field.encode_name: self._drawn(field.type) for field in kind.fields if chance.random() < 0.9}
            if issubclass(kind.cls, wire.FromSession) and self._sessions and chance.random() < 0.95:
                fields |= {"session": chance.choice(self._sessions), "epoch": self._epoch}
            if kind.cls is wire.Register:
                fields |= {"rank": chance.randrange(-1, 2), "client": chance.getrandbits(40)}
            with contextlib.suppress(TypeError):  # a field without a default is missing
                return kind.cls(**fields)
            return self._drawn(kind)
        if isinstance(kind, inspect.IntType):
            numbers = (*NUMBERS, *self._ids, kind.ge, kind.le)
            return chance.choice([number for number in numbers if number is not None and kind.ge <= number <= kind.le])
        if isinstance(kind, inspect.FloatType):
            return chance.choice([kind.ge or 0.0, kind.le or 1.0, 0.5])
        if isinstance(kind, inspect.UnionType):
            return self._drawn(chance.choice(kind.types))
        if isinstance(kind, inspect.VarTupleType | inspect.ListType):
            return [self._drawn(kind.item_type) for _ in range(chance.choice((0, 1, 3)))]
        if isinstance(kind, inspect.StrType):
            return chance.choice(("", f"text {chance.randrange(100)}", "x" * (kind.max_length or 100)))
        return chance.random() < 0.5 if isinstance(kind, inspect.BoolType) else None

    def _payload(self) -> list[bytes]:
        length = self._chance.choice((0, 1, 31, 100, 1000, 5000))
        text = tokens(self._chance.randrange(6), length)
        return self._chance.choice(([text.tobytes()],) * 9 + ([b"abc"], [], [bytes(8), bytes(8)]))


@pytest.mark.parametrize("with_store", [False, True], ids=["memory alone", "with a store"])
def test_no_message_fails_the_hub_or_reaches_another_engine(make_hub, tmp_path, with_store):
    hub = make_hub(200, tmp_path / "store" if with_store else None, inline=1000)
    engine, chance, stored = hub.join("good", process=ELSEWHERE), random.Random(1), 0
    ids = [engine.registered.session, *(engine.reserve(text).run or 0 for text in TEXTS[:2])]
    fuzzer = Fuzzer(hub, chance, ids)
    for number in range(2000):
        fuzzer.send()
        if number % 40 == 0:
            text = chance.choice(TEXTS)
            with contextlib.suppress(ArenaFull):  # the other one may hold every slot
                engine.store(text)
                stored += 1
            engine.read(np.concatenate([text, text[:CHUNK]]))
            hub.pass_time(1.0)
        if number % 200 == 0:
            hub.state.check_integrity()
    assert {"Lookup", "Reserve", "Register"} <= fuzzer.answers.keys(), f"no message is accepted: {fuzzer.answers}"
    assert stored
    hub.settle()
    engine.ask(wire.Unregister)
    hub.service.gone(b"fuzzer")
    hub.pass_time(1000.0)
    hub.state.check_integrity()
    gauges = hub.service.stats().gauges
    assert gauges["sessions"] == gauges["read_leases"] == gauges["write_leases"] == 0
    assert gauges["arena_quarantined_bytes"] == 0
