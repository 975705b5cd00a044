"""What is found in planted logs, held against brute force."""

import numpy as np
import pytest
from blendhub_tools.analysis.analyzer import Analyzer, Sizes
from blendhub_tools.analysis.formats import Prompt
from blendhub_tools.analysis.lines import Place
from blendhub_tools.analysis.simulated_hub import MOST_SLOTS, SimulatedHub
from blendhub_tools.analysis.tallies import Costs
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub import PluginHost
from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import MOST_GENERATION

HOST = PluginHost.discover()
WINDOW = 64
"""The default ``min_match_tokens``."""


def text(random, length):
    """Tokens so many that texts are alike nowhere by chance."""
    return random.integers(0, 2**32, length, dtype=np.uint32)


def planted(seed, n_documents, n_prompts, system, most_between, per_prompt=4):
    """Prompts of documents in changing orders, with new text between them and a new question."""
    random = np.random.default_rng(seed)
    documents = [text(random, int(random.integers(WINDOW, 400))) for _ in range(n_documents)]
    beginning = text(random, system)
    prompts = []
    for _ in range(n_prompts):
        parts = [beginning]
        for number in random.choice(n_documents, min(n_documents, per_prompt), replace=False):
            parts += [text(random, int(random.integers(0, most_between + 1))), documents[number]]
        prompts.append(np.concatenate([*parts, text(random, 20)]))
    return prompts


def seen_before(prompts):
    """For each prompt, how many of its tokens lie in a stretch of WINDOW tokens that an earlier prompt has."""
    known = set()
    for prompt in prompts:
        data, covered = prompt.tobytes(), np.zeros(len(prompt), bool)
        windows = [data[at * 4 : (at + WINDOW) * 4] for at in range(len(prompt) - WINDOW + 1)]
        for at, window in enumerate(windows):
            if window in known:
                covered[at : at + WINDOW] = True
        known.update(windows)
        yield int(covered.sum())


def common_beginnings(prompts):
    for number, prompt in enumerate(prompts):
        yield max((common(prompt, other) for other in prompts[:number]), default=0)


def common(one, other):
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length


def play(prompts, slots=(), matchers=DEFAULT_MATCHERS, **more):
    hub = SimulatedHub(HOST, matchers, [*slots, MOST_SLOTS], **more)
    return hub, [hub.play(prompt, Place("log", number)) for number, prompt in enumerate(prompts, 1)]


LOGS = st.builds(
    planted,
    st.integers(0, 2**32),
    n_documents=st.integers(1, 8),
    n_prompts=st.integers(1, 8),
    system=st.sampled_from([0, 64, 200]),
    most_between=st.sampled_from([0, 30, 200]),
)


@settings(max_examples=40, deadline=None)
@given(LOGS)
def test_what_was_seen_before_is_found_to_the_token(prompts):
    _, played = play(prompts, max_generation=MOST_GENERATION)
    assert [sum(one.reused[-1]) for one in played] == list(seen_before(prompts))


@settings(max_examples=40, deadline=None)
@given(LOGS)
def test_a_prefix_cache_reuses_the_longest_common_beginning(prompts):
    _, played = play(prompts, matchers=(PluginChoice("prefix"),), only_beginnings=True)
    assert [one.reused[-1].exact for one in played] == list(common_beginnings(prompts))


def test_the_analyzer_adds_up_what_was_played():
    prompts = planted(3, n_documents=6, n_prompts=20, system=100, most_between=40)
    analyzer = Analyzer(HOST, Sizes(arenas=(8, 64)))
    for number, prompt in enumerate(prompts, 1):
        day = 86400.0 * (20_000 + number // 10)
        analyzer.add(Prompt(Place("log", number), time=day, ids=prompt), prompt)
    total = analyzer.total
    assert total.requests == 20 and total.tokens == sum(map(len, prompts))
    assert total.anywhere == sum(seen_before(prompts))
    assert total.prefix == sum(common_beginnings(prompts))
    assert sum(group.share.anywhere for group in analyzer.days.by_name.values()) == total.anywhere
    assert list(analyzer.days.by_name) == ["2024-10-04", "2024-10-05", "2024-10-06"]
    (system,) = analyzer.systems.by_name.values()
    assert system.share == total and system.first_seen == Place("log", 1)
    largest = analyzer.hub.arenas[-1]
    assert (largest.reused.exact, largest.reused.moved + largest.reused.settled) == (total.exact, total.moved)


def test_what_was_blended_counts_as_settled_behind_the_same_prefix_and_costs_what_exact_text_costs():
    random = np.random.default_rng(11)
    document, start, answer, question = (text(random, length) for length in (600, 70, 80, 90))
    analyzer = Analyzer(HOST, Sizes(arenas=()), Costs(0.0, 0.5))
    (arena,) = analyzer.hub.arenas
    seen = [tuple(arena.reused)]
    for number, parts in enumerate(([document], [start, document], [start, document, answer, question]), 1):
        prompt = np.concatenate(parts)
        analyzer.add(Prompt(Place("log", number), ids=prompt), prompt)
        seen.append(tuple(arena.reused))
    second, third = (tuple(np.subtract(seen[at], seen[at - 1])) for at in (2, 3))
    assert second == (0, 599, 0)
    assert third == (70, 0, 600)
    assert analyzer.ratios.quantile(0.01) == pytest.approx(170 / 840, abs=1e-3)


@pytest.mark.parametrize("only_beginnings", [False, True])
def test_one_pass_gives_the_curve_that_a_pass_for_each_size_gives(only_beginnings):
    prompts = planted(5, n_documents=40, n_prompts=150, system=64, most_between=60)
    tokens = sum(map(len, prompts))
    sizes = (8, 16, 32, 64, 128)
    together, _ = play(prompts, sizes, only_beginnings=only_beginnings)
    for arena in together.arenas:
        alone = SimulatedHub(HOST, DEFAULT_MATCHERS, [arena.slots], only_beginnings)
        for number, prompt in enumerate(prompts, 1):
            alone.play(prompt, Place("log", number))
        (single,) = alone.arenas
        share, expected = sum(arena.reused) / tokens, sum(single.reused) / tokens
        assert share == pytest.approx(expected, abs=0.06), arena.slots


def test_no_arena_holds_more_than_it_can_and_the_index_forgets_what_the_largest_evicts():
    prompts = planted(7, n_documents=60, n_prompts=80, system=64, most_between=100)
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [4, 16])
    for number, prompt in enumerate(prompts, 1):
        hub.play(prompt, Place("log", number))
        hub.check_integrity()
    assert all(arena.evictions for arena in hub.arenas)


def test_a_prompt_larger_than_the_arena_is_played():
    random = np.random.default_rng(1)
    prompt = text(random, 5000)
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [2, 4])
    for _ in range(3):
        hub.play(prompt, Place("log", 1))
        hub.check_integrity()


def test_the_last_token_is_always_computed():
    prompt = text(np.random.default_rng(2), 300)
    _, (first, again) = play([prompt, prompt])
    assert sum(first.reused[-1]) == 0
    assert again.reused[-1].exact == 299
