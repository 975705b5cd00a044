"""What is put is what is got, or nothing; in a real cluster."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from blendhub_mooncake.bytes import MooncakeBytes
from blendhub_mooncake.codes import CodeMeaning, of_get, of_put
from blendhub_mooncake.frames import ChildSetup

from blendhub.core.errors import InvalidInput, StoreAway, StoreFailed
from blendhub.hub.memory.arena import Arena
from harness.servers.mooncake_cluster import Cluster

pytestmark = pytest.mark.slow
MIB = 2**20
DONE, ABSENT, FAILED, ADRIFT = CodeMeaning


@pytest.fixture(scope="module")
def place(lasting_cluster: Cluster, setup_for: Callable[[Cluster], ChildSetup]) -> Iterator[MooncakeBytes]:
    with contextlib.closing(MooncakeBytes(setup_for(lasting_cluster), 20.0)) as place:
        yield place


def test_a_batch_of_any_sizes_comes_back_at_other_offsets(place: MooncakeBytes, arena: Arena) -> None:
    sizes = [1, 4095, 4096, 65_537, 3 * MIB + 1, 16 * MIB]
    keys = [f"group/{size}" for size in sizes]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    for start, size in zip(starts, sizes, strict=True):
        arena.slot(start, size)[:] = np.random.default_rng(size).bytes(size)
    assert place.put(keys, list(zip(starts, sizes, strict=True))) == [True] * len(keys)
    arena.slot(0, 64 * MIB)[:] = bytes(64 * MIB)
    before = place.stats()
    others = [start + 30 * MIB + 7 for start in starts]
    assert place.get([*keys, "never"], [*zip(others, sizes, strict=True), (0, MIB)]) == [*[True] * len(keys), False]
    for other, size in zip(others, sizes, strict=True):
        assert bytes(arena.slot(other, size)) == np.random.default_rng(size).bytes(size)
    assert bytes(arena.slot(MIB, 29 * MIB)) == bytes(29 * MIB), "a get wrote outside its extents"
    counted = {name: value - before[name] for name, value in place.stats().items() if value != before[name]}
    assert counted == {"mooncake_get_keys": 6, "mooncake_get_absent": 1}
    assert place.get([keys[4]], [(0, sizes[4] + 1)]) == [False], "an object that is shorter than the span"


def test_extents_outside_the_arena_and_keys_that_are_named_twice_are_refused(place: MooncakeBytes) -> None:
    for extent in ((0, 0), (-1, 4), (64 * MIB - 3, 4), (64 * MIB, 1), (2**70, 1)):
        with pytest.raises(InvalidInput, match="not inside an arena"):
            place.get(["key"], [extent])
    with pytest.raises(InvalidInput, match="distinct keys"):  # Mooncake would fill one span only
        place.get(["key", "key"], [(0, 1), (1, 1)])


def test_a_key_is_absent_only_when_that_is_certain_and_adrift_unless_its_transfer_has_ended(place, monkeypatch) -> None:
    gets = {
        **{4096: DONE, 4095: ABSENT, 0: ABSENT, -704: ABSENT, -712: ABSENT},
        **{-703: FAILED, -707: FAILED, -900: FAILED, -800: ADRIFT, -1: ADRIFT, -31337: ADRIFT},
    }
    puts = {0: DONE, -200: ABSENT, -900: FAILED, -704: ADRIFT, -800: ADRIFT, -31337: ADRIFT}
    assert {code: of_get(code, 4096) for code in gets} == gets
    assert {code: of_put(code) for code in puts} == puts
    # A master that does not answer is away, and other failures are not.
    for codes, error in (([-900, -901], StoreAway), ([-900, -707], StoreFailed)):
        monkeypatch.setattr(place, "_call", lambda call, codes=codes: (place._process, codes))
        with pytest.raises(StoreFailed, match="2 of its keys failed, the first with code -900") as raised:
            place.get(["one", "other"], [(0, MIB), (MIB, MIB)])
        assert type(raised.value) is error
