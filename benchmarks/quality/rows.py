"""Rows of shares that are won back."""

import statistics
from collections.abc import Iterator
from typing import Literal

from benchmarks.quality.found import Found
from benchmarks.report import Row, missing_row


def rows_of_selectors(found: Found, prefix: str) -> Iterator[Row]:
    full_s = statistics.median(found.full.first_token_s)
    for name in found.selectors:
        for one in found.curve(name):
            what = f"{name}: share won back, {statistics.mean(one.recomputed):.0%} of the moved text computed, "
            what += f"first token after {statistics.median(one.first_token_s) / full_s:.2f} of full prefill's time"
            compared = found.compared(one)
            spread = compared.interval(found.main)
            yield row(f"{prefix}{name}_{round(one.ratio * 100):02d}", what, compared.share(found.main), spread=spread)


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
