"""The ratio that follows audits, on simulated workloads: it settles where agreement is held, and does not swing."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.vllm.scheduler.held_ratio import LEAST, Evidence, HeldRatio, ladder

TARGET = 0.98
ALLOWED = 1 - TARGET
RATIOS, FIRST = ladder(0.15, 0.05, 0.5)
AUDITS = 16_000


class Workload:
    """Requests whose share of disagreements at each step of the ladder is given."""

    def __init__(self, shares: list[float], seed: int, held: HeldRatio | None = None) -> None:
        self.held = held or HeldRatio(TARGET, RATIOS, FIRST)
        self.shares = dict(zip(RATIOS, shares, strict=True))
        self.shares[None] = 0.0
        self.served: list[float] = []
        """The share of disagreements of what was served at each audit."""
        self.changes: list[int] = []
        self._random = random.Random(seed)

    def run(self, audits: int) -> "Workload":
        for _ in range(audits):
            self.served.append(self.shares[self.held.ratio])
            ratio = self.held.audited(self._random.random())
            if self.held.note(ratio, self._random.random() >= self.shares[ratio]):
                self.changes.append(len(self.served))
        return self


# More recomputation, fewer disagreements.
workloads = st.lists(st.floats(0, 0.6), min_size=len(RATIOS), max_size=len(RATIOS)).map(
    lambda shares: sorted(shares, reverse=True)
)
near_the_target = st.lists(st.floats(0, 3 * ALLOWED), min_size=len(RATIOS), max_size=len(RATIOS)).map(
    lambda shares: sorted(shares, reverse=True)
)


@given(workloads | near_the_target, st.integers(0, 999))
@pytest.mark.slow
def test_with_a_stationary_workload_the_ratio_settles_and_agreement_is_held(shares, seed):
    workload = Workload(shares, seed).run(AUDITS)
    late = [at for at in workload.changes if at > AUDITS // 2]
    assert len(late) <= 2, "the ratio swings"
    assert statistics.mean(workload.served[AUDITS // 2 :]) < 1.75 * ALLOWED
    # It does not settle above a step that is clearly good enough, or below one that is clearly not.
    lowest = next((number for number, share in enumerate(shares) if share <= ALLOWED / 10), len(RATIOS))
    settled = RATIOS.index(workload.held.ratio) if workload.held.ratio is not None else len(RATIOS)
    assert settled <= max(lowest, 0)


@pytest.mark.parametrize("seed", range(40))
def test_a_workload_that_becomes_harder_is_noticed_within_200_audits_however_long_all_was_well(seed):
    held = Workload([0.0] * len(RATIOS), seed).run(5000).held
    assert held.ratio == 0.05
    harder = Workload([0.5, 0.4, 0.3, 0.005, 0.001], seed, held).run(300)
    assert harder.changes[0] < 50
    assert all(share <= ALLOWED for share in harder.served[200:])


def test_where_no_ratio_is_enough_text_is_reused_exactly_until_it_is_again():
    workload = Workload([0.3] * len(RATIOS), 1).run(300)
    assert workload.held.ratio is None and workload.held.audited(0.9) == RATIOS[-1], "audits go on, at the top"
    workload.run(5000)
    assert workload.held.ratio is None
    easier = Workload([0.0] * len(RATIOS), 1, workload.held).run(6000)
    assert easier.held.ratio == RATIOS[0]
    assert len(easier.changes) == len(RATIOS), "one step at a time"


@given(workloads, st.integers(0, 99), st.lists(st.sampled_from([0.0, 0.2, 0.7, 1.0]), max_size=20))
def test_audits_look_at_the_step_in_use_or_the_one_below_and_others_say_nothing(shares, seed, foreign):
    workload = Workload(shares, seed).run(50)
    held = workload.held
    step = RATIOS.index(held.ratio) if held.ratio is not None else len(RATIOS)
    seen = {held.audited(chance / 20) for chance in range(20)}
    assert seen <= {*RATIOS[max(step - 1, 0) : step + 1]} and (held.ratio in seen or held.ratio is None)
    before = held.ratio
    assert not any(held.note(ratio, agrees) for ratio in foreign for agrees in (True, False))
    assert held.ratio == before


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_ladder_goes_from_the_lowest_to_the_highest_ratio_through_the_first(one, two, three):
    low, start, high = sorted((one, two, three))
    ratios, first = ladder(start, low, high)
    assert ratios[0] == low and ratios[first] == start and ratios[-1] == high
    assert all(lower < higher for lower, higher in itertools.pairwise(ratios))
    assert all(higher <= 3 * max(lower, LEAST) for lower, higher in itertools.pairwise(ratios))


def test_what_happens_as_often_as_allowed_is_no_evidence_for_long():
    chance = random.Random(1)
    times = []
    for multiples in ((2.0, 4.0, 8.0, 16.0, 32.0), (1 / 2, 1 / 4, 1 / 8)):
        for _ in range(30):
            evidence, n = Evidence(ALLOWED, multiples, 1e-3), 0
            while evidence.weight < 1 and n < 5000:
                evidence.note(chance.random() >= ALLOWED)
                n += 1
            times.append(n)
    assert statistics.mean(times) > 1000
