"""How fast the rolling-hash matcher finds reuse, and in how much memory, on one core."""

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import progress, seconds
from blendhub import PluginHost, Span
from blendhub.contracts import Matcher

CHUNK = 256
RUN_TOKENS = 8 * CHUNK
PROMPT = 32_768
VOCABULARY = 150_000
Array = npt.NDArray[np.uint32]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    scale = 20 if options.quick else 1
    parts = speed(100_000 // scale), growth(1_000_000 // scale)
    rows = [row for part in parts for row in part]
    finish("matchers", rows, "numpy numba blendhub-matchers", options.json)


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
    """Memory as the index grows, looked at all the way, not only at round sizes."""
    matcher, runs, worst = _matcher(), chunks * CHUNK // RUN_TOKENS, 0.0
    for run in progress(range(runs), "growth"):
        matcher.add(run, _run(run), Span(0, RUN_TOKENS))
        if len(matcher) >= 100_000:
            worst = max(worst, matcher.nbytes / len(matcher))
    what = f"the most memory held for a stored token at any size from 100,000 tokens to {chunks:,} chunks"
    yield row("bytes_per_token", what, "bytes", [worst], 6.0, "lower")


def _matcher() -> Matcher:
    matcher: Matcher = PluginHost.discover().create("matcher", "rolling_hash")
    return matcher


def _run(number: int) -> Array:
    return np.random.default_rng(number).integers(0, VOCABULARY, RUN_TOKENS, dtype=np.uint32)


if __name__ == "__main__":
    main()
