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
from benchmarks.report import Row, arguments, finish, missing_row, row
from benchmarks.timing import progress, seconds
from blendhub import PluginHost, Span
from blendhub.contracts import Matcher

CHUNK = 256
RUN_CHUNKS = 8
PROMPT = 32_768
VOCABULARY = 150_000

Array = npt.NDArray[np.uint32]


def main() -> None:
    options = arguments(__doc__ or "")
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    scale = 20 if options.quick else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(options.peer_python, core, Path(folder)) if options.peer_python else None
        rows += coverage(peer, documents=400 // scale, prompts=50 // scale)
        rows += speed(peer, chunks=100_000 // scale)
        rows.append(memory(chunks=1_000_000 // scale))
        rows += retained(chunks=600_000 // scale)
    if peer is None:
        rows += [
            missing_row(id, "not measured: name the peer's interpreter with --peer-python", "x", bar)
            for id, bar in PEER_BARS.items()
        ]
    finish("matchers", rows, ["python", "numpy", "numba", "blendhub", "blendhub-matchers"], options.json)


PEER_BARS = {"match_vs_peer": 5.0, "coverage_vs_peer": 1.3, "add_vs_peer": 1.0, "discard_vs_peer": 1.0}


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


def coverage(peer: Peer | None, documents: int, prompts: int) -> list[Row]:
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
    known = {window for sequence in stored for window in _windows(sequence)}
    ours, theirs = [], []
    for _ in progress(range(prompts), "coverage"):
        parts = []
        for document in random.choice(documents, 8, replace=False):
            parts += [texts[document], _text(random, int(random.integers(20, 200)))]
        prompt = np.concatenate(parts)
        shared = _covered(len(prompt), [(at, at + ORACLE) for at, w in enumerate(_windows(prompt)) if w in known])
        found = _covered(len(prompt), [(m.span.start, m.span.end) for m in matcher.match(prompt)])
        ours.append(float((found & shared).sum() / shared.sum()))
        if peer:
            ranges = peer("covered", peer.file("prompt", prompt))
            theirs.append(float((_covered(len(prompt), ranges) & shared).sum() / shared.sum()))
    rows = [row("coverage", "share of the truly reusable tokens that is found", "", ours, 0.97)]
    if theirs:
        rows.append(row("coverage_peer", "the peer's share, at its chunks of 256 tokens", "", theirs))
        ratio = [statistics.mean(ours) / statistics.mean(theirs)]
        rows.append(row("coverage_vs_peer", "our share by the peer's", "x", ratio, PEER_BARS["coverage_vs_peer"]))
    return rows


ORACLE = 16
"""The brute force calls a token reusable if it lies in a stored stretch of at least this many tokens."""


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


def speed(peer: Peer | None, chunks: int) -> list[Row]:
    """One large index: matching, adding and discarding, in turn with the peer."""
    runs = chunks // RUN_CHUNKS
    matcher = new_matcher()
    prompt = _half_stored_prompt(runs)
    everything = np.stack([_run(number) for number in range(runs)]) if peer else None
    added, discarded = [], []
    for _ in progress(range(3), "add and discard"):
        for run in range(runs) if len(matcher) else ():
            matcher.discard(run, Span(0, RUN_CHUNKS * CHUNK))
        ours = _fill(matcher, 0, runs)
        if peer and everything is not None:
            peer("reset")
            added.append(peer("add", peer.file("runs", everything)) / ours)
            theirs = peer("discard", runs, RUN_CHUNKS * CHUNK)
            peer("add", peer.file("runs", everything))
            removed = new_matcher()
            _fill(removed, 0, runs)
            ours = seconds(partial(_discard, removed, runs))
            discarded.append(theirs / ours)
    matched, ratios = [], []
    path = peer.file("prompt", prompt) if peer else ""
    for _ in progress(range(15), "match"):
        ours = seconds(lambda: matcher.match(prompt))
        matched.append(len(prompt) / ours / 1e6)
        if peer:
            ratios.append(peer("match", path) / ours)
    what = f"match of 32,768 tokens, half of them stored, {chunks:,} chunks of 256, one core"
    rows = [row("match_mtok_s", what, "Mtok/s", matched, 10.0)]
    for id, what, values in (
        ("match_vs_peer", "the peer's time by ours, same prompt, same stored tokens", ratios),
        ("add_vs_peer", f"the peer's time by ours, storing {chunks:,} chunks", added),
        ("discard_vs_peer", f"the peer's time by ours, discarding {chunks:,} chunks", discarded),
    ):
        if values:
            rows.append(row(id, what, "x", values, PEER_BARS[id]))
    return rows


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


def retained(chunks: int) -> list[Row]:
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
    return [row("retained", what, "", [found / chunks], 1.0)]


if __name__ == "__main__":
    main()
