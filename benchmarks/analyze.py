"""How fast `blendhub analyze` plays prompts beyond reading and tokenising them, and in how much memory. On one core."""

import os
import resource
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.report import Row, arguments, finish, row
from benchmarks.timing import progress
from blendhub import PluginHost
from blendhub.core.tokens import as_tokens
from blendhub.tools.analysis.analyzer import Analyzer, Sizes, few_collections
from blendhub.tools.analysis.formats import Prompt
from blendhub.tools.analysis.lines import Place

TOKENS = 100_000_000
VOCABULARY = 150_000
ARENAS = (128, 512, 2048, 8192, 32_768)
"""In chunks: 4 GiB to 1 TiB of a model with 128 KiB of KV a token, as the command has it by default."""

Array = npt.NDArray[np.uint32]


def main() -> None:
    options = arguments(__doc__ or "")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokens = TOKENS // (50 if options.quick else 1)
    with few_collections():
        rows = _play(tokens)
    finish("analyze", rows, ["python", "numpy", "numba", "blendhub", "blendhub-matchers"], options.json)


def _play(tokens: int) -> list[Row]:
    analyzer = Analyzer(PluginHost.discover(), Sizes(ARENAS))
    before = _peak_gib()
    speeds, seconds, played = [], 0.0, 0
    steps = 20
    prompts = _prompts(n_documents=tokens // 5000)
    for step in progress(range(1, steps + 1), "play"):
        while analyzer.total.tokens < tokens * step // steps:
            number, prompt = next(prompts)
            begun = time.process_time()
            analyzer.add(Prompt(Place("log", number), time=1.7e9 + number, ids=prompt), prompt)
            seconds += time.process_time() - begun
            played += len(prompt)
        speeds.append(played / seconds / 1e6)
        seconds, played = 0.0, 0
    total = analyzer.total
    print(f"{total.requests:,} prompts; reused as prefix {total.prefix / total.tokens:.0%}, anywhere "
          f"{total.anywhere / total.tokens:.0%}")  # fmt: skip
    what = f"{tokens:,} tokens, prompts of about {total.tokens // total.requests:,}, {len(ARENAS) + 1} sizes of arenas"
    return [
        row("analyze_mtok_s", f"played: {what}", "Mtok/s", speeds, 5.0),
        row("analyze_memory", f"the process's largest memory: {what}", "GiB", [_peak_gib()], 4.0, "lower"),
        row("analyze_memory_before", "the same before the first prompt", "GiB", [before], better="lower"),
    ]


def _prompts(n_documents: int) -> Iterator[tuple[int, Array]]:
    """A system prompt, five documents in any order, of which some are asked for often, and new text around them."""
    random = np.random.default_rng(1)
    lengths = random.integers(300, 1500, n_documents)
    system = _text(random, 400)
    number = 0
    while True:
        number += 1
        parts = [system]
        for document in np.minimum(random.zipf(1.2, 5), n_documents) - 1:
            # Made anew from its number, so that the measured memory is the analyzer's.
            text = _text(np.random.default_rng(int(document) + 2), int(lengths[document]))
            parts += [_text(random, int(random.integers(5, 60))), text]
        yield number, as_tokens(np.concatenate([*parts, _text(random, 60)]))


def _text(random: np.random.Generator, length: int) -> Array:
    return random.integers(0, VOCABULARY, length, dtype=np.uint32)


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
