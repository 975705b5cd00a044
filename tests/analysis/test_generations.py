"""No chain of edits makes KV of a higher generation than the bound, held against a count of moves token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub import PluginHost
from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.spans import Match
from blendhub.tools.analysis.lines import Place
from blendhub.tools.analysis.simulated_hub import MIN_SAVED_TOKENS, MOST_SLOTS, SimulatedHub

HOST = PluginHost.discover()
RANDOM = np.random.default_rng(33)
TURNS = [RANDOM.integers(0, 2**32, 70 + 9 * number, dtype=np.uint32) for number in range(40)]
"""Texts that are alike nowhere, each long enough to be found."""


class CountedMoves:
    """How often KV was moved on the way to each stored run, by the prompts alone: nothing is asked of the hub."""

    def __init__(self, hub: SimulatedHub) -> None:
        self._hub = hub
        self._of_runs: dict[int, tuple[np.ndarray, int]] = {}
        """The prompt that each run is of, and how often what was reused in that prompt had been moved."""

    def play(self, prompt: np.ndarray) -> int:
        """Serve a prompt; returns how often what it reuses was moved on its way there."""
        before = set(self._hub.places)
        matches = self._hub.play(prompt, Place("log", 1)).matches
        moved = max((self._moves(prompt, match) for match in matches if not match.exact), default=0)
        first = next((match.span.start for match in matches if not match.exact), len(prompt))
        for run in set(self._hub.places) - before:
            is_behind = min(chunk.span.start for chunk in self._hub._index.runs[run].chunks.values()) >= first
            self._of_runs[run] = prompt, moved if is_behind else 0
        return moved

    def _moves(self, prompt: np.ndarray, match: Match) -> int:
        source, moves = self._of_runs[match.run]
        end = match.span.end
        is_same = match.source_start == match.span.start and np.array_equal(source[:end], prompt[:end])
        return moves + (not is_same)


@st.composite
def edits(draw):
    """A conversation, and what an agent does to it: turns come, go and change places, each time many at once."""
    turns = list(range(draw(st.integers(3, 6))))
    prompts = [list(turns)]
    for new in range(len(turns), len(turns) + draw(st.integers(4, 14))):
        kind = draw(st.sampled_from(["say", "drop", "swap", "branch"]))
        at = draw(st.integers(0, len(turns) - 1))
        if kind == "drop" and len(turns) > 2:
            del turns[at]
        elif kind == "swap":
            turns.insert(0, turns.pop(at))
        elif kind == "branch":
            turns = list(draw(st.sampled_from(prompts)))
        turns.append(new)
        prompts.append(list(turns))
    return [np.concatenate([TURNS[number] for number in prompt]) for prompt in prompts]


@settings(max_examples=120, deadline=None)
@given(edits(), st.integers(1, 4))
def test_no_chain_of_edits_makes_a_higher_generation_than_the_bound(prompts, bound):
    assert min(map(len, TURNS)) > MIN_SAVED_TOKENS
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [MOST_SLOTS], max_generation=bound)
    counted = CountedMoves(hub)
    for prompt in prompts:
        assert counted.play(prompt) <= bound
        assert max(generations(hub)) <= bound


def generations(hub: SimulatedHub) -> set[int]:
    return {run.origin.generation for run in hub._index.runs.values()}


def test_without_a_bound_edits_drift():
    """Each edit moves what was computed behind the last one: the property above is not met by chance."""
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [MOST_SLOTS], max_generation=255)
    for number in range(1, 12):
        hub.play(np.concatenate([TURNS[39 - number], *TURNS[:number]]), Place("log", number))
    assert max(generations(hub)) >= 8


def test_text_that_is_too_old_is_computed_and_may_be_moved_again():
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [MOST_SLOTS], max_generation=1)

    def reused(*turns: int) -> int:
        prompt = np.concatenate([TURNS[turn] for turn in turns])
        return sum(len(match.span) for match in hub.play(prompt, Place("log", 1)).matches)

    assert reused(30, 0) == 0
    assert reused(31, 0, 1) == len(TURNS[0])
    assert reused(32, 1) == 0, "the turn was computed behind moved text"
    assert reused(33, 1) == len(TURNS[1])
    assert reused(31, 0, 1) == len(TURNS[31]) + len(TURNS[0]) + len(TURNS[1]), "behind the same text nothing is moved"


def test_new_documents_are_not_lost_where_prompts_always_move_others():
    """Text that is first seen behind the highest generation may never be moved, so generations must not rise idly."""
    shares = {}
    for bound in (4, 255):
        random = np.random.default_rng(1)
        documents = [random.integers(0, 2**32, 256, dtype=np.uint32) for _ in range(80)]
        hub, found, tokens = SimulatedHub(HOST, DEFAULT_MATCHERS, [MOST_SLOTS], max_generation=bound), 0, 0
        for number in range(160):
            chosen = random.choice(max(4, number // 2), 4, replace=False)
            parts = [part for at in chosen for part in (random.integers(0, 2**32, 20, dtype=np.uint32), documents[at])]
            prompt = np.concatenate(parts)
            matches = hub.play(prompt, Place("log", number + 1)).matches
            if number >= 80:
                tokens += len(prompt)
                found += sum(len(match.span) for match in matches)
        shares[bound] = found / tokens
    assert shares[4] > 0.9 * shares[255]


def test_a_few_old_words_do_not_make_a_new_text_old():
    """Each prompt has a large exact text, a phrase from the prompt before, and text of its own that begins the phrase
    of the next one.
    """
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [MOST_SLOTS])
    large = [np.random.default_rng(seed).integers(0, 2**32, 1500, dtype=np.uint32) for seed in range(12)]
    for text in large:
        hub.play(text, Place("log", 1))
    for number in range(12):
        phrase = TURNS[number][-66:]
        prompt = np.concatenate([TURNS[30 + number % 10][:9], large[number], phrase, TURNS[number + 1]])
        hub.play(prompt, Place("log", number + 2))
    assert max(generations(hub)) <= 2
