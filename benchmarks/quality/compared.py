"""Which selectors are compared, and how each is to be asked."""

from typing import Any

import msgspec

DEFAULT_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
BAR_RATIOS = (0.15, 0.3)


class Compared(msgspec.Struct, frozen=True):
    label: str
    name: str
    options: dict[str, Any] = {}
    reads_question: bool = False
    """Whether its picks depend on the question, so that each question needs a separate blend."""
    probe_layers: float = 0.0
    """What it computes before it picks: the share of the tokens times the number of layers."""
    ships: bool = True
    """Whether users can have it: others only show how good or bad it can be."""

    @property
    def choice(self) -> dict[str, Any]:
        return {"name": self.name, "options": self.options}


SELECTORS = (
    Compared("attended", "attended", reads_question=True),
    Compared("hkvd", "hkvd", probe_layers=0.25),
    Compared("hkvd windows", "hkvd", {"window_tokens": 4, "probe_share": 1.0}, probe_layers=1.0),
    Compared("first_k", "first_k", {"k": 0}),
    Compared("random", "random", ships=False),
)
