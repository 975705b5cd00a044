"""How much reuse the rolling-hash matcher finds, how fast, in how much memory; and the peer beside it.

Everything runs on one core. With ``--peer-python`` the peer does the same work in the same run, in turn with ours.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peer import PeerProcess
from benchmarks.report import Planned, Row, arguments, finish, row, rows_of
from benchmarks.timing import progress, seconds
from blendhub import PluginHost, Span
from blendhub.contracts import Matcher

CHUNK = 256
RUN_CHUNKS = 8
PROMPT = 32_768
VOCABULARY = 150_000

Array = npt.NDArray[np.uint32]


ORACLE = 16
"""The brute force calls a token reusable if it lies in a stored stretch of at least this many tokens."""
BESIDE_PEER = {
    "coverage_peer": Planned("the peer's share, at its chunks of 256 tokens", "", better="higher"),
    "coverage_vs_peer": Planned("our share, relative to the peer's", "x", 1.3, "higher"),
    "match_vs_peer": Planned("the peer's time, relative to ours, same prompt and stored tokens", "x", 5.0, "higher"),
    "add_vs_peer": Planned("the peer's time, relative to ours, storing all chunks", "x", 1.0, "higher"),
    "discard_vs_peer": Planned("the peer's time, relative to ours, discarding all chunks", "x", 1.0, "higher"),
}


def main() -> None:
    options = arguments(__doc__ or "")
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    scale = 20 if options.quick else 1
    beside: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(options.peer_python, core, Path(folder)) if options.peer_python else None
        rows = [
            coverage(peer, beside, documents=400 // scale, prompts=50 // scale),
            speed(peer, beside, chunks=100_000 // scale),
            memory(chunks=1_000_000 // scale),
            retained(chunks=600_000 // scale),
        ]
    rows += rows_of(BESIDE_PEER, beside, "needs --peer-python")
    finish("matchers", rows, ["python", "numpy", "numba", "blendhub", "blendhub-matchers"], options.json)


class Peer(PeerProcess):
    """The peer's matcher, on the same core."""

    def __init__(self, python: str, core: int, folder: Path) -> None:
        super().__init__(python, "peer_matcher.py", str(core))
        self._folder = folder

    def file(self, name: str, tokens: Array) -> str:
        """Where the peer can read these tokens."""
        path = self._folder / f"{name}.npy"
        np.save(path, tokens)
        return str(path)


def new_matcher() -> Matcher:
    matcher: Matcher = PluginHost.discover().create("matcher", "rolling_hash")
    return matcher


def coverage(peer: Peer | None, beside: dict[str, list[float]], documents: int, prompts: int) -> Row:
    """Documents stored inside earlier prompts, found again in new orders; held against brute force."""
    random = np.random.default_rng(1)
    texts = [_text(random, int(length)) for length in random.integers(300, 1500, documents)]
    stored = []
    for first in range(0, documents, 8):
        parts = []
        for text in texts[first : first + 8]:
            parts += [_text(random, int(random.integers(20, 300))), text]
        stored.append(np.concatenate(parts))
    matcher = new_matcher()
    for run, sequence in enumerate(stored):
        matcher.add(run, sequence, Span(0, len(sequence)))
    if peer:
        peer("reset")
        peer("store_texts", peer.file("stored", np.concatenate(stored)), [len(one) for one in stored])
    known_windows = {window for sequence in stored for window in _windows(sequence)}
    ours, theirs = [], []
    for _ in progress(range(prompts), "coverage"):
        parts = []
        for document in random.choice(documents, 8, replace=False):
            parts += [texts[document], _text(random, int(random.integers(20, 200)))]
        prompt = np.concatenate(parts)
        shared = _covered(
            len(prompt), [(at, at + ORACLE) for at, w in enumerate(_windows(prompt)) if w in known_windows]
        )
        found = _covered(len(prompt), [(m.span.start, m.span.end) for m in matcher.match(prompt)])
        ours.append(float((found & shared).sum() / shared.sum()))
        if peer:
            ranges = peer("covered", peer.file("prompt", prompt))
            theirs.append(float((_covered(len(prompt), ranges) & shared).sum() / shared.sum()))
    if theirs:
        beside["coverage_peer"] = theirs
        beside["coverage_vs_peer"] = [statistics.mean(ours) / statistics.mean(theirs)]
    return row("coverage", "share of the truly reusable tokens that is found", "", ours, 0.97)


def _windows(tokens: Array) -> Iterator[bytes]:
    data = tokens.tobytes()
    return (data[at * 4 : (at + ORACLE) * 4] for at in range(len(tokens) - ORACLE + 1))


def _covered(length: int, ranges: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(length, np.bool_)
    for start, end in ranges:
        mask[start:end] = True
    return mask


def _text(random: np.random.Generator, length: int) -> Array:
    """Tokens as frequent as words are: a few are everywhere."""
    return np.minimum(random.zipf(1.2, length), VOCABULARY).astype(np.uint32)


def _run(number: int, chunks: int = RUN_CHUNKS) -> Array:
    return np.random.default_rng(number).integers(0, VOCABULARY, chunks * CHUNK, dtype=np.uint32)


def _discard(matcher: Matcher, runs: int) -> None:
    for run in range(runs):
        matcher.discard(run, Span(0, RUN_CHUNKS * CHUNK))


def _fill(matcher: Matcher, first: int, last: int) -> float:
    """Store the runs ``[first, last)``; returns the seconds that storing took."""
    seconds = 0.0
    for number in range(first, last):
        tokens = _run(number)
        start = time.perf_counter()
        matcher.add(number, tokens, Span(0, len(tokens)))
        seconds += time.perf_counter() - start
    return seconds


def _half_stored_prompt(runs: int) -> Array:
    """32,768 tokens: stored runs and new ones in turn."""
    random = np.random.default_rng(2)
    picked = random.choice(runs, PROMPT // (2 * RUN_CHUNKS * CHUNK), replace=False)
    return np.concatenate([part for number in picked for part in (_run(int(number)), _run(2**40 + int(number)))])


def speed(peer: Peer | None, beside: dict[str, list[float]], chunks: int) -> Row:
    """One large index: matching, adding and discarding, in turn with the peer."""
    runs = chunks // RUN_CHUNKS
    matcher = new_matcher()
    ours = _fill(matcher, 0, runs)
    prompt = _half_stored_prompt(runs)
    if peer:
        everything = np.stack([_run(number) for number in range(runs)])
        for _ in progress(range(3), "add and discard"):
            peer("reset")
            beside.setdefault("add_vs_peer", []).append(peer("add", peer.file("runs", everything)) / ours)
            theirs = peer("discard", runs, RUN_CHUNKS * CHUNK)
            peer("add", peer.file("runs", everything))
            removed = new_matcher()
            ours = _fill(removed, 0, runs)
            beside.setdefault("discard_vs_peer", []).append(theirs / seconds(partial(_discard, removed, runs)))
    matched = []
    for _ in progress(range(15), "match"):
        taken = seconds(lambda: matcher.match(prompt))
        matched.append(len(prompt) / taken / 1e6)
        if peer:
            beside.setdefault("match_vs_peer", []).append(peer("match", peer.file("prompt", prompt)) / taken)
    what = f"match of 32,768 tokens, half of them stored, {chunks:,} chunks of 256, one core"
    return row("match_mtok_s", what, "Mtok/s", matched, 10.0)


def memory(chunks: int) -> Row:
    """Memory as the index grows, looked at all the way, not only at round sizes."""
    matcher = new_matcher()
    runs = chunks // RUN_CHUNKS
    step = max(runs // 500, 1)
    worst = 0.0
    for stored in progress(range(0, runs, step), "growth"):
        _fill(matcher, stored, stored + step)
        if len(matcher) >= 100_000:
            worst = max(worst, matcher.nbytes / len(matcher))
    what = f"the most memory held for a stored token at any size from 100,000 tokens to {chunks:,} chunks"
    return row("bytes_per_token", what, "bytes", [worst], 6.0, "lower")


def retained(chunks: int) -> Row:
    """Every chunk that was ever stored is found again, each token of it."""
    matcher = new_matcher()
    runs = chunks // RUN_CHUNKS
    _fill(matcher, 0, runs)
    found = 0
    together = 16
    order = np.random.default_rng(3).permutation(runs)
    for first in progress(range(0, runs, together), "retained"):
        prompt = np.concatenate([_run(int(number)) for number in order[first : first + together]])
        mask = _covered(len(prompt), [(m.span.start, m.span.end) for m in matcher.match(prompt)])
        found += int(mask.reshape(-1, CHUNK).all(axis=1).sum())
    what = f"share of {chunks:,} stored chunks that are still found whole"
    return row("retained", what, "", [found / chunks], 1.0)


if __name__ == "__main__":
    main()
