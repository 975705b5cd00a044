"""The figures that have names, and some of them bars."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from benchmarks.quality.found import Found
from benchmarks.report import Row, missing_row
from blendhub.tools.advice.outcomes import Outcome, accuracy

AT = (0.15, 0.3)
HIGHEST_REUSED = {"cross": 0.5, "split": 0.5, "chained": 0.5}
LOWEST_FULL = 0.95
LOWEST_COUNTING = 0.9


def rows_of_reader(found: Found, shipped: Sequence[str]) -> list[Row]:
    return [*_of_the_reader(found), *_of_the_default(found), _lead(found, shipped), *rows_of_selectors(found)]


def rows_of_texts(found: Found) -> list[Row]:
    rows = []
    for number, name in enumerate(found.columns):
        id = name.replace(" ", "_").lower()
        rows.append(row(f"full_{id}", f"{name} of full prefill", accuracy(found.full)[number]))
        rows.append(row(f"reuse_{id}", f"{name} of reuse, nothing recomputed", accuracy(found.reuse)[number]))
    return [*rows, *rows_of_selectors(found)]


def rows_of_selectors(found: Found, prefix: str = "") -> Iterator[Row]:
    full_s = statistics.median(found.full.first_token_s)
    for label in found.labels:
        for one in found.curve(label):
            what = f"{label}: share won back, {statistics.mean(one.recomputed):.0%} of the moved text computed, "
            what += f"first token after {statistics.median(one.first_token_s) / full_s:.2f} of full prefill's time"
            id = f"{prefix}{label.replace(' ', '_')}_{round(one.ratio * 100):02d}"
            yield _won(found, one, id, what, found.main, None)


def _of_the_reader(found: Found) -> Iterator[Row]:
    full, reuse = accuracy(found.full), accuracy(found.reuse)
    for number, name in enumerate(found.columns):
        lowest = LOWEST_COUNTING if name == "counting" else LOWEST_FULL
        yield row(f"full_{name}", f"{name}: right answers of full prefill", full[number], lowest)
        what = f"{name}: right answers of reuse, nothing recomputed"
        yield row(f"reuse_{name}", what, reuse[number], HIGHEST_REUSED.get(name), "lower")


def _of_the_default(found: Found) -> Iterator[Row]:
    name = found.default
    won = f"{name}: share won back of what reuse loses"
    alias, chained = [found.columns.index("alias")], [found.columns.index("chained")]
    wanted: list[tuple[str, str, float, list[int]]] = [
        ("recovered_15", "at 0.15", 0.15, found.main),
        ("recovered_30", "at 0.30", 0.3, found.main),
        ("alias_15", "at 0.15, where the question shares no word with its fact", 0.15, alias),
        ("chained_15", "at 0.15, of references to references", 0.15, chained),
    ]
    for id, said, ratio, columns in wanted:
        yield _won(found, found.get(name, ratio), id, f"{won}, {said}", columns, None)
    what = f"{won}, at 0.15, where all questions of a prompt but one find it settled for that one"
    yield _won(found, found.all.get((name, "settled", 0.15)), "settled_15", what, found.main, None)
    ours, first = found.get(name, 0.15), found.get("first_k", 0.15)
    plain, counting = found.columns.index("plain"), found.columns.index("counting")
    full = accuracy(found.full)[plain]
    share = accuracy(ours)[plain] / full if ours and full else None
    yield row("plain_15", f"{name}: right answers to plain questions at 0.15, to full prefill's", share, 0.99)
    ahead = accuracy(ours)[counting] - accuracy(first)[counting] if ours and first else None
    yield row("counting_15", f"{name}: right answers to counting at 0.15, less those of first_k", ahead, 0.0)
    shares = [share for one in found.holes(name) if (share := found.compared(one).share(found.main)) is not None]
    what = f"{won}, at 0.15, with a hole first, in the middle, or last: the worst"
    yield row("hole_15", what, min(shares, default=None), 0.75, spread=(min(shares), max(shares)) if shares else None)


def _lead(found: Found, shipped: Sequence[str]) -> Row:
    leads = [
        theirs - ours
        for ratio in AT
        for label in shipped
        if label != found.default
        and (ours := found.share(found.default, ratio)) is not None
        and (theirs := found.share(label, ratio)) is not None
    ]
    what = f"by how much another shipped selector wins back more than {found.default}, at 0.15 or 0.30: the most"
    return row("default_wins", what, max(leads, default=None), 0.02, "lower")


def _won(found: Found, outcome: Outcome | None, id: str, what: str, columns: list[int], bar: float | None) -> Row:
    compared = found.compared(outcome) if outcome else None
    share = compared.share(columns) if compared else None
    return row(id, what, share, bar, spread=compared.interval(columns) if compared and share is not None else None)


def row(
    id: str,
    what: str,
    value: float | None,
    bar: float | None = None,
    better: Literal["higher", "lower"] = "higher",
    spread: tuple[float, float] | None = None,
) -> Row:
    if value is None:
        return missing_row(id, f"{what}: not measured, or reuse loses next to nothing", "share", bar, better)
    value = float(value)
    ok = None if bar is None else value >= bar if better == "higher" else value <= bar
    return Row(id, what, value, "share", bar, better, ok, spread)
