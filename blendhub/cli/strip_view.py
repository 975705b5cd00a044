"""Strips of prompts in a terminal."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from blendhub.core.spans import Match
from blendhub.outcome.fates import COLOURS, LETTERS, WHY, Fate, Stretch, fate_of, in_parts
from blendhub.outcome.reasons import NotReused, longest

ON_DARK = {Fate.CACHED}
"""Fates whose colours need white letters."""

LONGEST_LIST = 20


def show_strip(title: str, plan: Sequence[Stretch], tokens: Mapping[Fate, int]) -> None:
    """Print the title, the prompt as one line of letters, and the meaning of each letter."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(Text(title, "bold"))
    parts = in_parts(plan, console.width)
    console.print(Text.assemble(*((LETTERS[part.fate], _style(part.fate)) for part in parts)))
    whole = sum(tokens.values())
    for fate in Fate:
        if count := tokens.get(fate, 0):
            key = (f" {LETTERS[fate]} ", _style(fate))
            share = f"{count / whole:.0%}"
            console.print(Text.assemble(key, f" {count:>9,} {share:>4}  {fate.label}: {WHY[fate]}"))


def show_sources(sources: Iterable[Match], n_sources: int) -> None:
    """Print the run that each reused stretch came from."""
    shown = list(sources)[:LONGEST_LIST]
    if not shown:
        return
    print(f"{'tokens of the prompt':>25} {'run':>20} {'its tokens':>25}  how")
    for match in shown:
        end = match.source_start + len(match.span)
        here, there = f"{match.span.start:,} to {match.span.end:,}", f"{match.source_start:,} to {end:,}"
        print(f"{here:>25} {match.run:>20} {there:>25}  {fate_of(match)}")
    if n_sources > len(shown):
        print(f"and {n_sources - len(shown):,} more")


def show_not_reused(computed: Sequence[NotReused], n_computed: int) -> None:
    """Print the reasons why stretches were computed."""
    if not computed:
        return
    print(f"{'tokens of the prompt':>25} {'tokens':>10}  why it was not reused")
    shown = longest(computed, LONGEST_LIST)
    for one in shown:
        print(f"{f'{one.span.start:,} to {one.span.end:,}':>25} {len(one.span):>10,}  {one.why.sentence}")
    if n_computed > len(shown):
        print(f"and {n_computed - len(shown):,} shorter ones")


def _style(fate: Fate) -> str:
    return f"{'white' if fate in ON_DARK else 'black'} on {COLOURS[fate]}"
