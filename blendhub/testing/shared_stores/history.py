"""Any history of several objects at one place, compared with a dictionary."""

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from blendhub.contracts import SharedStore
from blendhub.testing.histories import run_histories
from blendhub.testing.sentences import holds
from blendhub.testing.shared_stores.base import ROOMY, Catalogue, FleetTests, Member, chunk, content, key

LOG_LENGTH = 12
members = st.integers(0, 2)


class FleetHistory(RuleBasedStateMachine):
    """Three members save, discard, load and follow in any order; a dictionary says what there should be.

    As hubs do, each writes its own runs, and a chunk of a run once.
    """

    def __init__(self, create: Callable[[Path, int, int], SharedStore]) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._create = create
        self._names = count()
        self.members = [self._open() for _ in range(3)]
        self.runs: dict[int, int] = {}
        """The owner of each run."""
        self.next_chunk: dict[int, int] = {}
        self.there: dict[tuple[int, int], int] = {}
        """The seed of each chunk."""

    def teardown(self) -> None:
        for member in self.members:
            member.follow()
            assert member.catalogue == self.expected(), "a change was missed without a word"
            member.close()
        self._folder.cleanup()

    def _open(self) -> Member:
        return Member(self._create(Path(self._folder.name) / "place", ROOMY, LOG_LENGTH))

    @rule(who=members, n=st.integers(1, 3))
    def save_a_new_run(self, who: int, n: int) -> None:
        name = next(self._names)
        self.runs[name], self.next_chunk[name] = who, 0
        self.save(who, name, n)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), n=st.integers(1, 2))
    def grow_a_run(self, data: st.DataObject, n: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)), label="run")
        if self.next_chunk[name] + n <= 8:
            self.save(self.runs[name], name, n)

    def save(self, who: int, name: int, n: int) -> None:
        first = self.next_chunk[name]
        seeds = {index: name * 8 + index for index in range(first, first + n)}
        self.members[who].save_batch(name, seeds)
        self.there.update({(name, index): seed for index, seed in seeds.items()})
        self.next_chunk[name] += n

    @precondition(lambda self: self.there)
    @rule(who=members, data=st.data())
    def discard(self, who: int, data: st.DataObject) -> None:
        name, index = data.draw(st.sampled_from(sorted(self.there)), label="chunk")
        self.members[who].discard(name, index)
        del self.there[name, index]

    @precondition(lambda self: self.runs)
    @rule(who=members, data=st.data(), index=st.integers(0, 7))
    def load(self, who: int, data: st.DataObject, index: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)), label="run")
        seed = self.there.get((name, index))
        assert self.members[who].load(name, index) == (None if seed is None else [content(seed)])

    @rule(who=members)
    def follow(self, who: int) -> None:
        self.members[who].follow()
        assert self.members[who].catalogue == self.expected()

    @rule(who=members)
    def leave_and_come_back(self, who: int) -> None:
        self.members[who].close()
        self.members[who] = self._open()
        assert self.members[who].catalogue == self.expected()

    def expected(self) -> Catalogue:
        catalogue: Catalogue = {}
        for name, index in self.there:
            catalogue.setdefault(key(name), set()).add(chunk(index))
        return catalogue


@holds("Applied to the snapshot, the changes give the catalogue.")
class FleetHistoryTests(FleetTests):
    def test_any_history(self) -> None:
        run_histories(partial(FleetHistory, self.create), examples=40, steps=30)
