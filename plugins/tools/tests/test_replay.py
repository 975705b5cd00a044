"""What is found in planted logs, held against brute force and against a real hub."""

import numpy as np
import pytest
from blendhub_tools.analysis.analyzer import Analyzer
from blendhub_tools.analysis.replay import BLOCK_TOKENS, MAX_SLOTS, PrefixCache, Replay
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub import PluginHost
from blendhub.core.layout import MIN_DONOR_CONTEXT, MIN_SAVED_TOKENS
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span, gaps
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread

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
def test_what_was_seen_before_is_found_to_the_token_and_a_prefix_cache_has_the_common_beginning(prompts):
    replay, prefix_cache = Replay(HOST, MAX_SLOTS, min_donor_context=0), PrefixCache(2**20)
    assert [sum(reused_of(replay, prompt)) for prompt in prompts] == list(seen_before(prompts))
    in_blocks = [length // BLOCK_TOKENS * BLOCK_TOKENS for length in common_beginnings(prompts)]
    assert [prefix_cache.play(prompt) for prompt in prompts] == in_blocks


def test_a_small_prefix_cache_evicts_what_was_not_used_for_longest():
    one, other, third = (text(np.random.default_rng(seed), 10 * BLOCK_TOKENS) for seed in range(3))
    cache = PrefixCache(20 * BLOCK_TOKENS)
    assert [cache.play(prompt) for prompt in (one, other, one, third)] == [0, 0, len(one) - 1, 0]
    assert cache.play(one) == len(one) - 1 and cache.play(other) == 0


def test_the_analyzer_adds_up_what_was_played():
    prompts = planted(3, n_documents=6, n_prompts=20, system=100, most_between=40)
    analyzer = Analyzer(HOST, (8, 64))
    for prompt in prompts:
        analyzer.add(prompt)
    assert analyzer.prompts == 20 and analyzer.tokens == sum(map(len, prompts))
    replay = Replay(HOST, MAX_SLOTS)
    for prompt in prompts:
        replay.play(prompt)
    assert analyzer.arenas[-1].reused == replay.reused and sum(replay.reused) > 0.9 * sum(seen_before(prompts))
    assert sum(analyzer.arenas[0].reused) < sum(analyzer.arenas[-1].reused) and analyzer.arenas[0].cache.evictions


def reused_of(replay, prompt):
    before = replay.reused
    replay.play(prompt)
    return tuple(np.subtract(replay.reused, before))


@pytest.mark.parametrize("slots", [8, 1000])
def test_a_real_hub_finds_and_evicts_the_same(slots):
    replay = Replay(HOST, slots)
    space = replay.index.namespace
    with HubInThread(HubConfig(arena_gib=slots * space.slot_bytes / 2**30, metrics="")) as hub, hub.connect() as engine:
        engine.register("an-engine", space, rank=0)
        for number, prompt in enumerate(planted(1, 40, 60, system=100, most_between=90), 1):
            of_hub = engine.lookup(prompt, settled=0.0).result()
            serve(engine, prompt, of_hub.matches)
            if of_hub.lease is not None:
                engine.release(of_hub.lease).result()
            played, answered = (
                [(match.span, match.exact, match.settled) for match in matches]
                for matches in (replay.play(prompt), of_hub.matches)
            )
            assert played == answered, f"prompt {number}"
        evictions = engine.stats().result().counters["evictions"]
    assert replay.cache.evictions == evictions and bool(evictions) == (slots < 1000)
    replay.index.check_integrity()


def serve(engine, prompt, matches):
    """Store what an engine computes and blends of a prompt."""

    def store(span, kind="exact"):
        reserved = engine.reserve(prompt, span, provenance=Provenance(kind, donates_from=MIN_DONOR_CONTEXT)).result()
        if reserved.right:
            engine.commit(reserved.right, reserved.span.end).result()

    approximate = next((match.span.start for match in matches if not match.exact), len(prompt))
    for gap in gaps(Span(0, len(prompt)), (match.span for match in matches)):
        if gap.end <= approximate:
            store(gap)
        elif gap.end == len(prompt) or len(gap) >= MIN_SAVED_TOKENS:
            store(gap, "after_blended")
    moved = [match.span for match in matches if match.moved]
    if moved:
        store(Span(moved[0].start, moved[-1].end), "blended")


def test_a_prompt_larger_than_the_arena_is_played():
    prompt = text(np.random.default_rng(1), 5000)
    replay = Replay(HOST, 4)
    for _ in range(3):
        replay.play(prompt)
        replay.index.check_integrity()
    assert len(replay.cache.policy) <= 4
