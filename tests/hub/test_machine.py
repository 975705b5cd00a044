"""Any history of real clients that store, look up, stall, crash and reconnect, checked against the tokens.

The clients are those that engines use, over a transport that the test may cut; the test sets their clock and the
hub's. Every byte under a lease is compared, and no process ever has the right to write into a slot that the hub would
allocate to another.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Variant
from tests.hub.machine_engines import VARIANTS, WHICH, Line
from tests.hub.machine_writing import WritingRules


class HubMachine(WritingRules):
    @rule(which=WHICH, line=st.sampled_from(Line))
    def the_line_changes(self, which: int, line: Line) -> None:
        process = self.a_process(which)
        if line is Line.CUT and process.line.line is not Line.CUT:
            process.line.cut()
        process.line.line = line

    @rule(which=WHICH)
    def lines_are_good_again(self, which: int) -> None:
        for process in self.an_engine(which).processes:
            process.line.line = Line.GOOD
            process.keep_alive()

    @rule(which=WHICH)
    def keep_alive(self, which: int) -> None:
        self.a_process(which).keep_alive()

    @rule()
    def all_keep_alive(self) -> None:
        for engine in self.engines:
            for process in engine.processes:
                process.keep_alive()

    @rule(which=WHICH, child_lives=st.booleans())
    def crash(self, which: int, child_lives: bool) -> None:
        self.kill(self.an_engine(which), child_lives)

    @rule()
    def children_end(self) -> None:
        self.children_exit()

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        engine = self.an_engine(which)
        for process in engine.processes:
            process.client.close()
            for job in engine.jobs:
                assert not process.begin(job), "a client that was closed may write"
        self.kill(engine)

    @rule(orderly=st.booleans())
    def the_hub_is_restarted(self, orderly: bool) -> None:
        self.hub.restart()
        self.hub.service._watch.watch = lambda process: None
        if orderly:
            self.all_keep_alive()

    @rule(which=WHICH, variant=st.sampled_from([None, *VARIANTS]))
    def clear(self, which: int, variant: Variant | None) -> None:
        with contextlib.suppress(BlendHubError):
            self.an_engine(which).scheduler.client.clear(variant)

    @rule()
    def the_store_catches_up(self) -> None:
        self.hub.settle()

    @rule(garbage=st.integers(0, 2**62))
    def nonsense(self, garbage: int) -> None:
        for engine in self.engines[:1]:
            client = engine.workers[0].client
            with pytest.raises(BlendHubError):
                client.release(garbage).result()

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "hub"):
            self.hub.state.check_integrity()


TestAnyHistory: Any = HubMachine.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=60, suppress_health_check=list(HealthCheck))
TestAnyHistory.pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
