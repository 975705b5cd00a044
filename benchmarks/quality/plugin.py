"""The benchmark's own selectors, installed beside those that ship: the best that could be picked, and chance."""

from math import ceil
from pathlib import Path

import numpy as np
from blendhub_selectors.blocks import Blocks

from benchmarks.quality import oracle
from blendhub.contracts import Selection, Selector
from blendhub.core.spans import Span
from blendhub.framework.hookspecs import PluginSpec, hookimpl

RANDOM = "random"


class RandomSelector(Selector):
    """Blocks at random: those that any other selector must beat. The same ones whenever the same spans moved."""

    def pick(self, selection: Selection) -> list[Span]:
        spans = Blocks.of(selection.moved)
        blocks = spans.split(selection.block_tokens)
        order = np.random.default_rng(0).permutation(len(blocks.starts))
        return blocks.within(ceil(selection.ratio * int(spans.lengths.sum())), order).joined()


def install(folder: Path) -> None:
    """Have interpreters that search this folder find the selectors as a plugin."""
    facts = folder / "blendhub_quality-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: blendhub-quality\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[blendhub]\nquality = {__name__}\n")


@hookimpl
def blendhub_selectors() -> list[PluginSpec[Selector]]:
    return [
        PluginSpec(
            name=oracle.NAME,
            api=3,
            summary="the tokens that depend on other documents, which only the benchmark knows",
            factory=f"{oracle.__name__}:OracleSelector",
            options=oracle.OracleOptions,
        ),
        PluginSpec(name=RANDOM, api=3, summary="blocks at random", factory=f"{__name__}:RandomSelector"),
    ]
