"""All outcomes of a run: looks one up, and the one that it is compared with."""

from collections.abc import Sequence

from blendhub_tools.advice.outcomes import Comparison, Outcome


class Found:
    """The outcomes by selector, state and ratio."""

    def __init__(self, outcomes: Sequence[Outcome], columns: Sequence[str], main: Sequence[int], default: str) -> None:
        """``main``: the columns whose mean counts. ``default`` names the default selector."""
        self.all = {one.key: one for one in outcomes}
        self.columns = columns
        self.main = list(main)
        self.default = default

    @property
    def full(self) -> Outcome:
        return self.all["full", "", 1.0]

    @property
    def reuse(self) -> Outcome:
        return self.all["reuse", "", 0.0]

    @property
    def panels(self) -> list[tuple[str, list[int]]]:
        """What is shown: the mean that counts, and each column."""
        mean = [] if len(self.main) == 1 else [("mean of all", self.main)]
        return [*mean, *((name, [number]) for number, name in enumerate(self.columns))]

    @property
    def selectors(self) -> list[str]:
        """In the order in which they were asked."""
        return list(dict.fromkeys(name for name, _, _ in self.all if name not in ("full", "reuse")))

    def get(self, selector: str, ratio: float) -> Outcome | None:
        return self.all.get((selector, "", ratio))

    def curve(self, selector: str) -> list[Outcome]:
        """The outcomes of a selector by ratio."""
        ratios = sorted({ratio for other, _, ratio in self.all if other == selector})
        return [one for ratio in ratios if (one := self.get(selector, ratio))]

    def compared(self, outcome: Outcome) -> Comparison:
        return Comparison(outcome, self.full, self.reuse)
