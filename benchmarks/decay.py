"""What it costs until documents have donors: ``python -m benchmarks.decay``.

Prompts of five out of 64 documents and a new question, as in LMCache#4663, are played through the hub's index, with the
default ``min_donor_context`` and with none. Nothing is computed, so no model is needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blendhub_tools.analysis.replay import MAX_SLOTS, Replay

from benchmarks.report import finish, parser, row
from benchmarks.timing import progress, ratios
from blendhub import PluginHost
from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.core.spans import total
from blendhub.core.tokens import Tokens

N_DOCUMENTS, IN_A_PROMPT, QUESTION_TOKENS, NEARLY_ALL, VOCABULARY = 64, 5, 20, 0.9, 150_000
CORPORA = {"170": (18, 120, 220), "600": (18, 450, 750), "170_system": (300, 120, 220)}
"""The tokens of the system text, and those of the shortest and of the longest document."""
BORDERS = (MIN_DONOR_CONTEXT, 0)


class Course(NamedTuple):
    computed: list[int]
    """The number of tokens of each prompt that are computed."""
    tokens: list[int]
    """The number of tokens of each prompt."""
    until_donors: int
    """The number of prompts until nearly all documents have a donor for nearly all of their tokens."""


def course(corpus: str, border: int, queries: int, seed: int) -> Course:
    random, (system_tokens, shortest, longest) = np.random.default_rng(seed), CORPORA[corpus]

    def new(n_tokens: int) -> Tokens:
        return random.integers(0, VOCABULARY, n_tokens).astype(np.uint32)

    replay, system, elsewhere = Replay(PluginHost.discover(), MAX_SLOTS, border), new(system_tokens), new(500)
    documents = [new(int(random.integers(shortest, longest))) for _ in range(N_DOCUMENTS)]
    lacking, played = list(documents), Course([], [], queries)
    for number in range(queries):
        chosen = random.choice(N_DOCUMENTS, IN_A_PROMPT, replace=False)
        prompt = np.concatenate([system, *(documents[place] for place in chosen), new(QUESTION_TOKENS)])
        played.computed.append(len(prompt) - total(match.span for match in replay.play(prompt)))
        played.tokens.append(len(prompt))
        if len(lacking) > (1 - NEARLY_ALL) * N_DOCUMENTS:
            played = played._replace(until_donors=number + 1)
            found = ((text, replay.index.match(np.concatenate([elsewhere, text]))) for text in lacking)
            lacking = [text for text, moved in found if total(m.span for m in moved) < NEARLY_ALL * len(text)]
    return played


def draw(file: Path, courses: Mapping[tuple[str, int], Sequence[Course]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    FigureCanvasAgg(figure := Figure(figsize=(4.6, 3.2), layout="constrained"))
    axes = figure.add_subplot(xlabel="questions before", ylabel="share of the prompt that is computed", ylim=(0, 1))
    for corpus, colour in (("170", "#D55E00"), ("600", "#0072B2")):
        for border, style, suffix in zip(BORDERS, "-:", ("", ", all copies move"), strict=True):
            shares = np.mean([np.divide(run.computed, run.tokens) for run in courses[corpus, border]], 0)
            of_ten = np.convolve(shares, np.full(10, 0.1), "valid")
            axes.plot(of_ten, style, color=colour, label=f"documents of {corpus} tokens{suffix}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--picture", type=Path, metavar="FILE", help="draw the share of a prompt that is computed")
    options = arguments.parse_args()
    queries, seeds = (40, 2) if options.quick else (200, 16)
    turns = [(corpus, border) for corpus in CORPORA for border in BORDERS]
    courses = {turn: [course(*turn, queries, seed) for seed in range(seeds)] for turn in progress(turns, "play")}
    rows = []
    for corpus, (system_tokens, shortest, longest) in CORPORA.items():
        what = f"documents of {shortest} to {longest} tokens behind {system_tokens}"
        sides = [courses[corpus, border] for border in BORDERS]
        computed = ratios(*([sum(run.computed) for run in side] for side in sides))
        rows.append(row(f"steady_{corpus}", f"tokens computed, to no border: {what}", "x", computed, 1.25, "lower"))
        for name, side in zip(("donors", "donors_no_border"), sides, strict=True):
            until = [run.until_donors for run in side]
            rows.append(row(f"{name}_{corpus}", f"questions until 90% have a donor: {what}", "", until, better="lower"))
    if options.picture:
        draw(options.picture, courses)
    finish("decay", rows, "numpy blendhub-tools", options.json)


if __name__ == "__main__":
    main()
