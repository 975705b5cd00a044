"""What two matchers find in a retrieval workload: ``python -m examples.demo``, or ``make demo``.

Every prompt is a system prompt, a few of a dozen documents in the order that a search ranked them, and a
new question. A prefix cache finds the documents only where the same ones stood first before. No model and
no tokenizer take part: token ids are drawn at random, and a document is the same ids wherever it stands.
"""

import time

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendhub import Match, PluginHost, Span
from blendhub.tokens import Tokens

MATCHERS = ("prefix", "rolling_hash")
N_PROMPTS = 8
BAR_CELLS = 20


class Workload:
    """Prompts made of documents seen before, always in another order."""

    def __init__(self, seed: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        self._system = self._text(150)
        self._documents = [self._text(int(length)) for length in self._random.integers(300, 1500, 12)]

    def _text(self, length: int) -> Tokens:
        return self._random.integers(0, 128_000, length, dtype=np.uint32)

    def prompt(self) -> Tokens:
        ranked = self._random.choice(len(self._documents), 6, replace=False)
        question = self._text(int(self._random.integers(20, 60)))
        return np.concatenate([self._system, *(self._documents[i] for i in ranked), question])


def found_bar(matches: list[Match], length: int) -> Text:
    """The prompt from its first token to its last, with what was found filled in."""
    covered = np.zeros(length, bool)
    for match in matches:
        covered[match.span.start : match.span.end] = True
    cells = np.array_split(covered, BAR_CELLS)
    return Text.assemble(*(("█", "green") if cell.mean() > 0.5 else ("·", "dim") for cell in cells))


def main() -> None:
    host = PluginHost.discover()
    matchers = {name: host.create("matcher", name) for name in MATCHERS}
    totals = dict.fromkeys(MATCHERS, 0)
    n_tokens = 0
    workload = Workload()
    table = Table("prompt", "tokens", "matcher", "found", "where in the prompt", "match time")
    for number in range(N_PROMPTS):
        prompt = workload.prompt()
        for name, matcher in matchers.items():
            started = time.perf_counter()
            matches = matcher.match(prompt)
            milliseconds = 1000 * (time.perf_counter() - started)
            found = sum(len(match.span) for match in matches)
            matcher.add(number, prompt, Span(0, len(prompt)))
            totals[name] += found
            first = name == MATCHERS[0]
            table.add_row(
                str(number + 1) if first else "",
                f"{len(prompt):,}" if first else "",
                name,
                f"{found / len(prompt):4.0%}",
                found_bar(matches, len(prompt)),
                f"{milliseconds:.2f} ms",
                end_section=not first,
            )
        n_tokens += len(prompt)
    console = Console()
    console.print(table)
    for name in MATCHERS:
        console.print(f"{name}: {totals[name]:,} of {n_tokens:,} prompt tokens were found again")


if __name__ == "__main__":
    main()
