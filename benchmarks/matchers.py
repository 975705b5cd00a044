"""How much reuse the rolling-hash matcher finds, how fast, and in how much memory, on one core."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import progress, seconds
from blendhub import Match, PluginHost, Span
from blendhub.contracts import Matcher

CHUNK = 256
RUN_TOKENS = 8 * CHUNK
PROMPT = 32_768
VOCABULARY = 150_000
ORACLE = 16
"""The brute force calls a token reusable if it lies in a stored stretch of at least this many tokens."""
Array = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    scale = 20 if options.quick else 1
    parts = coverage(400 // scale, 50 // scale), speed(100_000 // scale), growth(1_000_000 // scale)
    rows = [row for part in parts for row in part]
    finish("matchers", rows, "numpy numba blendhub-matchers", options.json)


def coverage(documents: int, prompts: int) -> Iterator[Row]:
    """Documents stored inside earlier prompts, found again in new orders; held against brute force."""
    random = np.random.default_rng(1)

    def text(shortest: int, longest: int) -> Array:
        """Tokens as frequent as words are: a few are everywhere."""
        length = int(random.integers(shortest, longest))
        return np.minimum(random.zipf(1.2, length), VOCABULARY).astype(np.uint32)

    texts = [text(300, 1500) for _ in range(documents)]
    matcher, stored_windows = _matcher(), set[bytes]()
    for run, first in enumerate(range(0, documents, 8)):
        stored = np.concatenate([part for document in texts[first : first + 8] for part in (text(20, 300), document)])
        matcher.add(run, stored, Span(0, len(stored)))
        stored_windows.update(_windows(stored))
    shares = []
    for _ in progress(range(prompts), "coverage"):
        chosen = random.choice(documents, 8, replace=False)
        prompt = np.concatenate([part for document in chosen for part in (texts[document], text(20, 200))])
        reusable = np.zeros(len(prompt), np.bool_)
        for at, window in enumerate(_windows(prompt)):
            if window in stored_windows:
                reusable[at : at + ORACLE] = True
        shares.append(float((_covered(prompt, matcher.match(prompt)) & reusable).sum() / reusable.sum()))
    yield row("coverage", "share of the truly reusable tokens that is found", "", shares, 0.97)


def speed(chunks: int) -> Iterator[Row]:
    """A prompt half of which is in a large index."""
    matcher, runs = _matcher(), chunks * CHUNK // RUN_TOKENS
    for run in range(runs):
        matcher.add(run, _run(run), Span(0, RUN_TOKENS))
    stored = np.random.default_rng(2).choice(runs, PROMPT // (2 * RUN_TOKENS), replace=False).tolist()
    prompt = np.concatenate([part for run in stored for part in (_run(run), _run(2**40 + run))])
    rates = [PROMPT / seconds(lambda: matcher.match(prompt)) / 1e6 for _ in progress(range(15), "match")]
    what = f"match of 32,768 tokens, half of them stored, {chunks:,} chunks of 256, one core"
    yield row("match_mtok_s", what, "Mtok/s", rates, 10.0)


def growth(chunks: int) -> Iterator[Row]:
    """Memory as the index grows, looked at all the way, not only at round sizes; then all that was stored is found."""
    matcher, runs, worst = _matcher(), chunks * CHUNK // RUN_TOKENS, 0.0
    for run in progress(range(runs), "growth"):
        matcher.add(run, _run(run), Span(0, RUN_TOKENS))
        if len(matcher) >= 100_000:
            worst = max(worst, matcher.nbytes / len(matcher))
    what = f"the most memory held for a stored token at any size from 100,000 tokens to {chunks:,} chunks"
    yield row("bytes_per_token", what, "bytes", [worst], 6.0, "lower")
    retained, order = 0, np.random.default_rng(3).permutation(runs).tolist()
    for first in progress(range(0, runs, 16), "retained"):
        prompt = np.concatenate([_run(run) for run in order[first : first + 16]])
        retained += int(_covered(prompt, matcher.match(prompt)).reshape(-1, CHUNK).all(axis=1).sum())
    yield row("retained", f"share of {chunks:,} stored chunks that are still found whole", "", [retained / chunks], 1.0)


def _matcher() -> Matcher:
    matcher: Matcher = PluginHost.discover().create("matcher", "rolling_hash")
    return matcher


def _windows(tokens: Array) -> Iterator[bytes]:
    data = tokens.tobytes()
    return (data[at * 4 : (at + ORACLE) * 4] for at in range(len(tokens) - ORACLE + 1))


def _covered(prompt: Array, matches: Sequence[Match]) -> Mask:
    mask: Mask = np.zeros(len(prompt), np.bool_)
    for match in matches:
        mask[match.span.start : match.span.end] = True
    return mask


def _run(number: int) -> Array:
    return np.random.default_rng(number).integers(0, VOCABULARY, RUN_TOKENS, dtype=np.uint32)


if __name__ == "__main__":
    main()
