"""What only rolling_hash can get wrong: its table under collisions, its choice of spans, its bounds."""

import itertools
import time

import numpy as np
import pytest
from blendhub_matchers import rolling_kernels as kernels
from blendhub_matchers.options import RollingHashOptions
from blendhub_matchers.rolling_hash import RollingHashMatcher
from blendhub_matchers.rolling_hashing import MODULUS, PAGE, hash_of, hash_windows, power
from blendhub_matchers.rolling_search import AT_ONCE, END, RUN, START
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Matcher
from blendhub.core.spans import gaps
from blendhub.testing.matchers.finding import FindingTests
from blendhub.testing.matchers.machine import MatcherHistoryTests


@pytest.mark.slow
class TestWithOneTag(FindingTests, MatcherHistoryTests):
    """The hash says nothing at all; only comparing tokens is left."""

    def create(self) -> Matcher:
        return RollingHashMatcher(RollingHashOptions(min_match_tokens=1), hash_bits=0)


@pytest.mark.slow
class TestWithFewTags(MatcherHistoryTests):
    """Pages share homes in the table and have other tags, so that what goes must leave no gap before what stays."""

    def create(self) -> Matcher:
        return RollingHashMatcher(RollingHashOptions(min_match_tokens=1), hash_bits=4)


@pytest.mark.slow
class TestWithCrowds(FindingTests, MatcherHistoryTests):
    """Two pages with the same tokens are a crowd, and only the newest is compared."""

    def create(self) -> Matcher:
        return RollingHashMatcher(RollingHashOptions(min_match_tokens=1), few=1)


def best_cover(candidates: np.ndarray) -> tuple[int, int]:
    """By trying every set of candidates: the most tokens that can be covered, and the fewest pieces that do it."""
    length = int(candidates[:, END].max())
    best = (0, 0)
    for n in range(1, len(candidates) + 1):
        for some in itertools.combinations(candidates, n):
            mask = np.zeros(length, bool)
            for start, end, *_ in some:
                mask[start:end] = True
            best = max(best, (int(mask.sum()), -n))
    return best[0], -best[1]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=7))
def test_chosen_spans_cover_all_with_the_fewest_pieces(drawn):
    candidates = np.array(sorted((start, start + size, 0, n, 0) for n, (start, size) in enumerate(drawn)), np.int64)
    chosen = np.empty_like(candidates)
    count = kernels.choose(candidates, 1, chosen)
    pieces = chosen[:count]
    assert all(later[START] >= earlier[END] for earlier, later in itertools.pairwise(pieces))
    for start, end, _, n, _ in pieces.tolist():
        assert candidates[[row[RUN] for row in candidates.tolist()].index(n)][START] <= start < end
    covered = int((pieces[:, END] - pieces[:, START]).sum())
    assert (covered, count) == best_cover(candidates)


@pytest.mark.parametrize("overlap", [1, 16, 31, 48])
def test_candidates_are_found_wherever_they_begin_and_whatever_they_overlap(overlap):
    """A prompt is searched block by block; none may be lost at a border, nor where the one before it ended."""
    random = np.random.default_rng(5)
    shortest = 2 * PAGE - 1
    text = random.integers(0, 2**32, 2 * shortest - overlap, dtype=np.uint32)
    for offset in range(AT_ONCE + PAGE):
        unknown = random.integers(0, 2**32, offset, dtype=np.uint32)
        matcher = RollingHashMatcher(RollingHashOptions(min_match_tokens=1))
        matcher.add(1, text, Span(0, shortest))
        # What stands before it in its run decides where its only whole page begins.
        run = np.concatenate([unknown[: offset % PAGE], text[shortest - overlap :]])
        matcher.add(2, run, Span(0, len(run)))
        found = matcher.match(np.concatenate([unknown, text]))
        assert sum(len(match.span) for match in found if match.span.start >= offset) == len(text), offset


def test_the_tag_of_every_window_is_that_of_the_naive_polynomial():
    random = np.random.default_rng(2)
    prompt = random.choice(np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint32), 300)
    base, everything = 2**32 + 12_345_677, np.uint64(2**32 - 1)
    leaving = np.uint64(power(np.uint64(base), PAGE - 1))
    for first in (0, 5, len(prompt) - PAGE):
        tags = np.zeros(len(prompt) - PAGE + 1 - first, np.uint32)
        value = np.uint64(hash_of(prompt, first, first + PAGE - 1, np.uint64(base)))
        hash_windows(prompt, np.uint64(base), leaving, everything, np.zeros(8, np.uint8), first, value, tags)
        for number, tag in enumerate(tags.tolist()):
            naive = 0
            for token in prompt[first + number : first + number + PAGE].tolist():
                naive = (naive * base + token + 1) % MODULUS
            assert tag == naive * 0x9E3779B97F4A7C15 % 2**64 >> 32


@pytest.mark.parametrize("kernel", kernels.KERNELS, ids=lambda kernel: kernel.py_func.__name__)
def test_the_cache_on_disk_knows_all_sources(kernel):
    """Numba itself looks only at the file that the kernel stands in."""
    closed_over = [cell.cell_contents for cell in kernel.py_func.__closure__]
    assert kernels.digest_of_sources() in closed_over


def test_every_module_that_kernels_call_is_among_their_sources():
    called = {module.__name__ for module in kernels.MODULES}
    for module in kernels.MODULES:
        names = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
        assert {name for name in names if name.startswith("blendhub_matchers")} <= called


def a_matcher_with_a_hidden_document(newer: int) -> tuple[Matcher, np.ndarray]:
    """Its oldest run holds a document; all pages of that stand in newer runs too, in parts of it."""
    random = np.random.default_rng(8)
    matcher = RollingHashMatcher(RollingHashOptions())
    document = random.integers(0, 2**32, 1500, dtype=np.uint32)
    matcher.add(0, document, Span(0, len(document)))
    for run in range(1, newer + 1):
        tokens = random.integers(0, 2**32, len(document), dtype=np.uint32)
        part = slice(0, 900) if run % 2 else slice(600, 1500)
        tokens[part] = document[part]
        matcher.add(run, tokens, Span(0, len(tokens)))
    return matcher, document


@pytest.mark.parametrize("newer", [40, 600])
def test_a_document_is_one_match_although_newer_runs_hold_all_its_parts(newer):
    matcher, document = a_matcher_with_a_hidden_document(newer)
    assert [(match.run, match.span) for match in matcher.match(document)] == [(0, Span(0, len(document)))]


def test_discarding_runs_of_a_crowd_leaves_the_others_to_be_found():
    """With each page that goes, those behind it are listed anew; with the last, the trie is empty."""
    matcher, document = a_matcher_with_a_hidden_document(40)
    before = matcher.nbytes
    for run in range(1, 41):
        for start in range(0, len(document), 250):
            matcher.discard(run, Span(start, start + 250))
            assert sum(len(match.span) for match in matcher.match(document)) == len(document)
    matcher.discard(0, Span(0, len(document)))
    assert matcher.match(document) == [] and matcher.nbytes < before


@pytest.mark.parametrize("overlap", [20, 37])
def test_spans_that_overlap_by_too_much_to_stay_long_are_cut(overlap):
    """A repeated stretch has the next one begin before it ends; none of it may be lost for that."""
    random = np.random.default_rng(9)
    text = np.tile(random.integers(0, 2**32, 3, dtype=np.uint32), 100)
    matcher = RollingHashMatcher(RollingHashOptions())
    before = random.integers(0, 2**32, overlap, dtype=np.uint32)
    run = np.concatenate([before, text[:65], before[:3]])
    matcher.add(1, run, Span(0, len(run)))
    for length in range(65, len(text)):
        found = [match.span for match in matcher.match(text[:length])]
        assert all(len(gap) < 64 for gap in gaps(Span(0, length), found)), (length, found)


@pytest.mark.slow
@pytest.mark.alone
def test_neither_repetition_nor_many_candidates_make_a_match_slow():
    """Where a text is one repeated token, every window would be compared with every page; where a thousand runs hold
    the same text behind different ones, every window has a thousand owners.
    """
    random = np.random.default_rng(0)
    same, text = np.full(32_768, 7, np.uint32), random.integers(0, 2**32, 2048, dtype=np.uint32)
    matcher = RollingHashMatcher(RollingHashOptions(min_match_tokens=1))
    for run in range(16):
        matcher.add(run, same, Span(0, len(same)))
    for run in range(16, 1100):
        before, after = (random.integers(0, 2**32, PAGE * n, dtype=np.uint32) for n in (1 + run % 7, 1))
        tokens = np.concatenate([before, text, after])
        matcher.add(run, tokens, Span(0, len(tokens)))
    for prompt, most_s in ((same, 1.0), (np.tile(text, 500), 1.5)):
        started = time.perf_counter()
        matches = matcher.match(prompt)
        assert time.perf_counter() - started < most_s
        assert sum(len(match.span) for match in matches) == len(prompt)
    # A page over and over, each time between others: more owners than can be compared, and none that goes on.
    parts = [part for _ in range(1000) for part in (text[:40], random.integers(0, 2**32, 1, dtype=np.uint32))]
    started = time.perf_counter()
    matcher.match(np.concatenate(parts))
    assert time.perf_counter() - started < 1.0
    started = time.perf_counter()
    for start in range(0, 2048, 256):
        matcher.discard(16, Span(start, start + 256))
    assert time.perf_counter() - started < 0.2
