"""The answers and figures of the demo: as JSON, as tables, and in words."""

import statistics

import msgspec
from rich import box
from rich.table import Column, Table

from blendhub.outcome.fates import Fate, count
from examples.demo.questions import WAYS, Answer


class Figures(msgspec.Struct):
    """The figures of one way."""

    title: str
    first_token_s: float
    """The median of all questions."""
    speed_up: float
    """The median of full prefill's time over this way's, of the same question."""
    same_answers: float
    """The share of answers that are full prefill's, word for word."""
    tokens: dict[Fate, int]
    """The tokens of all questions' prompts together, by fate."""


class Report(msgspec.Struct):
    ways: dict[str, Figures]
    answers: list[Answer]


def make_report(answers: list[Answer]) -> Report:
    report = Report({}, answers)
    for way, (title, _) in WAYS.items():
        pairs = list(zip(_of("full", answers), _of(way, answers), strict=True))
        counts = [count(ours.plan) for _, ours in pairs]
        report.ways[way] = Figures(
            title=title,
            first_token_s=statistics.median(ours.first_token_s for _, ours in pairs),
            speed_up=statistics.median(full.first_token_s / ours.first_token_s for full, ours in pairs),
            same_answers=statistics.mean(full.answer == ours.answer for full, ours in pairs),
            tokens={fate: sum(counted[fate] for counted in counts) for fate in Fate},
        )
    return report


def _of(way: str, answers: list[Answer]) -> list[Answer]:
    """The answers of one way; questions come in the same order in every way."""
    return [answer for answer in answers if answer.way == way]


def in_words(report: Report) -> str:
    """The results of the demo in a few sentences."""
    full, blended, as_is = (report.ways[way] for way in WAYS)
    n_tokens = sum(blended.tokens.values())
    reused = 1 - (blended.tokens[Fate.HOLE] + blended.tokens[Fate.COMPUTED]) / n_tokens
    again = blended.tokens[Fate.RECOMPUTED] / n_tokens
    ours, theirs = 1e3 * blended.first_token_s, 1e3 * full.first_token_s
    return (
        f"SmolLM2-135M answered {len(report.answers) // len(WAYS)} questions about documents that it had seen before, "
        f"in other prompts and in another order, so vLLM's own prefix cache found nothing. BlendHub brought back the "
        f"KV of {reused:.0%} of the tokens and recomputed {again:.0%}: the first token came {blended.speed_up:.1f} "
        f"times sooner ({ours:.0f} ms, not {theirs:.0f}), and {blended.same_answers:.0%} of the answers are word for "
        f"word those of full prefill. With nothing recomputed {as_is.same_answers:.0%} are."
    )


def answers_table(report: Report) -> Table:
    """Each question, and what each way answered."""
    titles = (figures.title for figures in report.ways.values())
    table = Table("question", *titles, title="The answers", box=box.SIMPLE_HEAD)
    for answers in zip(*(_of(way, report.answers) for way in report.ways), strict=True):
        table.add_row(answers[0].question, *(answer.answer for answer in answers))
    return table


def figures_table(report: Report) -> Table:
    ways = report.ways.values()
    columns = (Column(figures.title, justify="right") for figures in ways)
    # This box fits into 80 columns.
    table = Table("", *columns, title="Medians, and what became of the tokens", box=box.SIMPLE_HEAD)
    table.add_row("time to first token", *(f"{1e3 * figures.first_token_s:.0f} ms" for figures in ways))
    table.add_row("speed-up", *(f"{figures.speed_up:.1f} x" for figures in ways))
    table.add_row("the same answer", *(f"{figures.same_answers:.0%}" for figures in ways), end_section=True)
    for fate in Fate:
        numbers = [(figures.tokens[fate], sum(figures.tokens.values())) for figures in ways]
        table.add_row(fate.label, *(f"{n:,} ({n / n_tokens:.0%})" if n else "-" for n, n_tokens in numbers))
    return table
