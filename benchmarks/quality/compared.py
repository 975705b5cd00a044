"""Which selectors are compared, and how each is to be asked."""

from typing import Any

import msgspec


class Compared(msgspec.Struct, frozen=True):
    name: str
    options: dict[str, Any] = {}
    reads_question: bool = False
    """Whether its picks depend on the question, so that each question needs a separate blend."""
    probe_layers: float = 0.0
    """What it computes before it picks: the share of the tokens times the number of layers."""

    @property
    def choice(self) -> dict[str, Any]:
        return {"name": self.name, "options": self.options}


SELECTORS = (
    Compared("attended", reads_question=True),
    Compared("hkvd", probe_layers=0.25),
    Compared("first_k", {"k": 0}),
)
