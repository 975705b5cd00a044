"""All outcomes of a run, to look them up and to lay one beside what it is compared with."""

from collections.abc import Sequence

from blendhub.tools.advice.outcomes import Comparison, Outcome, first


class Found:
    """The outcomes by selector, state and ratio."""

    def __init__(
        self, outcomes: Sequence[Outcome], columns: Sequence[str], main: Sequence[int], main_name: str, default: str
    ) -> None:
        """``main``: the columns whose mean counts, and how that mean is called."""
        self.all = {one.key: one for one in outcomes}
        self.columns = columns
        self.main = list(main)
        self.main_name = main_name
        self.default = default
        """The label of the default selector."""

    @property
    def full(self) -> Outcome:
        return self.all["full", "", 1.0]

    @property
    def reuse(self) -> Outcome:
        return self.all["reuse", "", 0.0]

    @property
    def panels(self) -> list[tuple[str, list[int]]]:
        """What is shown: the mean that counts, and each column."""
        mean = [] if len(self.main) == 1 else [(self.main_name, self.main)]
        return [*mean, *((name, [number]) for number, name in enumerate(self.columns))]

    @property
    def labels(self) -> list[str]:
        """The selectors, in the order in which they were asked."""
        return list(dict.fromkeys(label for label, _, _ in self.all if label not in ("full", "reuse")))

    def get(self, label: str, ratio: float) -> Outcome | None:
        return self.all.get((label, "", ratio))

    def curve(self, label: str) -> list[Outcome]:
        """The outcomes of a selector by ratio."""
        ratios = sorted({ratio for other, _, ratio in self.all if other == label})
        return [one for ratio in ratios if (one := self.get(label, ratio))]

    def holes(self, label: str) -> list[Outcome]:
        return [one for one in self.all.values() if one.selector == label and one.state.startswith("hole")]

    def compared(self, outcome: Outcome) -> Comparison:
        """With full prefill and reuse of the same cases, the first of all; full prefill knows no holes."""
        reuse = self.all["reuse", outcome.state, 0.0] if outcome.state.startswith("hole") else self.reuse
        number = len(outcome.scores)
        return Comparison(outcome, first(self.full, number), first(reuse, number))

    def share(self, label: str, ratio: float) -> float | None:
        """What it wins back of the mean that counts."""
        one = self.get(label, ratio)
        return self.compared(one).share(self.main) if one else None
