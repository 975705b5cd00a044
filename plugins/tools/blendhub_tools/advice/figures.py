"""What is shown of a measurement, on the terminal and in a model card."""

import statistics
from collections.abc import Sequence

import msgspec

from blendhub_tools.advice.choice import agreed, agreement, interval
from blendhub_tools.advice.judge import FIRST, KL, NATS, RIGHT
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy
from blendhub_tools.advice.outcomes import interval as drawn_interval

LEAST_LOSS = 0.001


class Measured(msgspec.Struct, frozen=True):
    """One selector at one ratio, beside full prefill by the same engine."""

    ours: Outcome
    full: Outcome

    @property
    def computed(self) -> float:
        """The mean share of the moved tokens that was recomputed."""
        moved = (share for share, asked in zip(self.ours.recomputed, self.ours.asked, strict=True) if asked[KL])
        return statistics.mean(moved) if agreed(self.ours)[1] else 0.0

    @property
    def first_token_s(self) -> float:
        return statistics.median(self.ours.first_token_s)

    @property
    def relative_time(self) -> float:
        return self.first_token_s / statistics.median(self.full.first_token_s)

    @property
    def lost(self) -> tuple[float, float, float]:
        """The mean nats that are lost on an answer of full prefill's, and the interval."""
        low, high = drawn_interval(self.ours, NATS)
        mean = float(accuracy(self.ours)[NATS])
        # Rounded here, and then added to 0: no figure is -0.00.
        return 0.0 + round(-mean, 2), 0.0 + round(-high, 2), 0.0 + round(-low, 2)


def head(tokens: int) -> dict[str, int]:
    """The columns, and how wide each is on a terminal; 0: it is not shown there."""
    return {
        "selector": 12,
        "ratio": 5,
        "computed": 8,
        "answers": 7,
        "first token": 11,
        f"{tokens} tokens": 21,
        "nats lost": 18,
        "won back": 0,
        "KL": 0,
        "right": 5,
        "first token, s": 14,
        "of full prefill's": 0,
    }


def cells(one: Measured, reuse: Outcome | None) -> list[str]:
    """A row of the table. ``reuse``: the answers with nothing recomputed, which all others are compared with."""
    scores, (same_first, answers) = accuracy(one.ours), agreed(one.ours, FIRST)
    low, high = interval(one.ours)
    lost, least, most = one.lost
    knows_right = agreed(one.ours, RIGHT)[1]
    return [
        one.ours.selector,
        f"{one.ours.ratio:g}",
        f"{one.computed:.0%}",
        str(answers),
        f"{same_first / answers if answers else 0:.1%}",
        f"{agreement(one.ours):.1%} ({100 * low:.1f} to {100 * high:.1f})",
        f"{lost:.2f} ({least:.2f} to {most:.2f})",
        _won_back(one, reuse),
        f"{abs(scores[KL]):.3f}",
        f"{scores[RIGHT]:.0%}" if knows_right else "",
        f"{one.first_token_s:.3f}",
        f"{one.relative_time:.2f}",
    ]


def line(texts: Sequence[str], widths: Sequence[int]) -> str:
    """A line of the terminal."""
    shown = [(text, width) for text, width in zip(texts, widths, strict=True) if width]
    return "  ".join(text.ljust(width) for text, width in shown).rstrip()


def _won_back(one: Measured, reuse: Outcome | None) -> str:
    """The share of the nats that reuse loses, and its interval."""
    compared = Comparison(one.ours, one.full, reuse or one.ours, LEAST_LOSS)
    share, limits = compared.share([NATS]), compared.interval([NATS])
    return "" if share is None or limits is None else f"{share:.2f} ({limits[0]:.2f} to {limits[1]:.2f})"
