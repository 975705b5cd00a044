"""The page of the real model: a table for each workload."""

import statistics
from collections.abc import Iterator, Sequence

from blendhub_tools.advice.judge import ALL_KL, ANSWER, ANSWER_TOKENS, FIRST, KL, NATS, RIGHT, RIGHT_NATS, SURE_FIRST
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy

from benchmarks.quality.reader.cases import READER

LEAST_LOSS = 0.001
HEAD = (
    "",
    "KL won back",
    f"of {ANSWER_TOKENS} tokens",
    "nats won back",
    "of the right answer",
    "first token",
    "where surer than 0.5",
    f"{ANSWER_TOKENS} tokens",
    "right answers",
    "computed",
    "first token, s",
)


def page(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "# A real model, with and without reuse",
        "",
        "Against full prefill of the same model, whose tokens every answer is made to say. Won back: the share of what "
        "reuse loses when nothing is recomputed, in brackets 95% of the shares when prompts are drawn anew. Then in "
        "percent: the same first token, the same first token where full prefill is surer than 0.5, the same "
        f"{ANSWER_TOKENS} tokens, and right answers where full prefill's is right.",
        "",
    ]
    for workload in dict.fromkeys(one.workload for one in outcomes):
        lines += _table(workload, [one for one in outcomes if one.workload == workload])
    return "\n".join([*lines, "![by compute](by_compute.png)", "", "![by time](by_time.png)", ""])


def _table(workload: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    full, reuse = (next(one for one in outcomes if one.selector == name) for name in ("full", "reuse"))
    asked = [sum(column) for column in zip(*full.asked, strict=True)]
    yield f"## {workload}{', a small model that was trained for this repository' if workload == READER else ''}"
    yield ""
    yield (
        f"{asked[KL]} questions to {len(full.asked)} prompts; full prefill is right in {asked[RIGHT]}, and surer than "
        f"0.5 in {asked[SURE_FIRST]}. Reuse alone loses a KL of {-accuracy(reuse)[KL]:.3f}, and "
        f"{-accuracy(reuse)[NATS]:.2f} nats of full prefill's {ANSWER_TOKENS} tokens."
    )
    yield ""
    for cells in (
        HEAD,
        ["---"] * len(HEAD),
        *(_cells(Comparison(one, full, reuse, LEAST_LOSS)) for one in outcomes[1:]),
    ):
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _cells(compared: Comparison) -> list[str]:
    ours = compared.ours
    shares = [compared.share([column]) for column in (KL, ALL_KL, NATS, RIGHT_NATS)]
    scores, asked = accuracy(ours), [sum(column) for column in zip(*ours.asked, strict=True)]
    cells = ["" if share is None else f"{share:.2f}" for share in shares]
    if interval := compared.interval([KL]):
        cells[0] += f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return [
        f"{ours.selector} {ours.ratio:.0%} {ours.state}".strip(),
        *cells,
        *(f"{scores[column]:.0%}" if asked[column] else "" for column in (FIRST, SURE_FIRST, ANSWER, RIGHT)),
        f"{statistics.mean(ours.recomputed):.0%}",
        f"{statistics.median(ours.first_token_s):.2f}",
    ]
