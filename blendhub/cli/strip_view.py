"""What became of a prompt, in a terminal."""

import sys
from collections.abc import Sequence

from blendhub.core.spans import Match
from blendhub.outcome.fates import COLOURS, LETTERS, WHY, Fate, Stretch, count, fate_of, in_parts
from blendhub.outcome.reasons import NotReused, longest, not_reused
from blendhub.outcome.report import DoubtOutcome, Outcome

ON_DARK = {Fate.CACHED}
"""Fates whose colours need white letters."""

LONGEST_LIST = 20


def show_outcome(title: str, outcome: Outcome) -> None:
    strip = outcome.strip()
    _show_strip(title, strip)
    if outcome.sources:
        _show_sources(outcome.sources)
    if computed := not_reused(strip, outcome.unused):
        _show_not_reused(computed)
    if outcome.ratio is not None:
        how = ", as the hub has found it" if outcome.has_found_ratio else ""
        print(f"ratio: {outcome.ratio:.2f} of the moved text is recomputed{how}")
    if outcome.doubt:
        print(f"doubt: {_about(outcome.doubt)}")
    if outcome.reason:
        print(f"why: {outcome.reason}")


def _show_strip(title: str, strip: Sequence[Stretch]) -> None:
    """Print the title, the prompt as one line of letters, and the meaning of each letter."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(Text(title, "bold"))
    parts = in_parts(strip, console.width)
    console.print(Text.assemble(*((LETTERS[part.fate], _style(part.fate)) for part in parts)))
    tokens = count(strip)
    for fate, n_tokens in tokens.items():
        if n_tokens:
            key = (f" {LETTERS[fate]} ", _style(fate))
            share = f"{n_tokens / sum(tokens.values()):.0%}"
            console.print(Text.assemble(key, f" {n_tokens:>9,} {share:>4}  {fate.label}: {WHY[fate]}"))


def _show_sources(sources: Sequence[Match]) -> None:
    """Print the run that each reused stretch came from."""
    print(f"{'tokens of the prompt':>25} {'run':>20} {'its tokens':>25}  how")
    for match in sources[:LONGEST_LIST]:
        end = match.source_start + len(match.span)
        here, there = f"{match.span.start:,} to {match.span.end:,}", f"{match.source_start:,} to {end:,}"
        print(f"{here:>25} {match.run:>20} {there:>25}  {fate_of(match)}")
    if len(sources) > LONGEST_LIST:
        print(f"and {len(sources) - LONGEST_LIST:,} more")


def _show_not_reused(computed: Sequence[NotReused]) -> None:
    """Print the reasons why stretches were computed."""
    print(f"{'tokens of the prompt':>25} {'tokens':>10}  why it was not reused")
    for stretch in longest(computed, LONGEST_LIST):
        place = f"{stretch.span.start:,} to {stretch.span.end:,}"
        print(f"{place:>25} {len(stretch.span):>10,}  {stretch.code.message}")
    if len(computed) > LONGEST_LIST:
        print(f"and {len(computed) - LONGEST_LIST:,} shorter ones")


def _about(doubt: DoubtOutcome) -> str:
    passed = f"{doubt.passed:,} tokens in doubt did not wait" if doubt.passed else ""
    if not doubt.token:
        return passed
    is_same = "the same token" if doubt.agrees else "another token"
    held = (
        f"token {doubt.token:,} of the answer had a margin of {doubt.margin:.2f} nats, and waited "
        f"{doubt.seconds:.2f} s for exact KV, from which the model says {is_same}"
    )
    return f"{passed}; {held}" if passed else held


def _style(fate: Fate) -> str:
    return f"{'white' if fate in ON_DARK else 'black'} on {COLOURS[fate]}"
