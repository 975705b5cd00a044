"""Writes a model card: what reuse costs one model on one file of questions."""

import importlib.util
import os
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from blendhub import __version__
from blendhub.core.errors import InvalidInput
from blendhub_tools.advice.answering import Served
from blendhub_tools.advice.choice import agreed
from blendhub_tools.advice.figures import Measured, cells, head
from blendhub_tools.advice.judge import RIGHT
from blendhub_tools.advice.outcomes import Outcome

NO_CURVE = "The card has no curve: drawing it needs matplotlib, `pip install 'blendhub[tools]'`."


class Measurement(msgspec.Struct, frozen=True):
    model: str
    data: Path
    has_answers: bool
    tokens: int
    served: Served
    measured: list[Measured]

    @property
    def reuse(self) -> Outcome | None:
        return next((one.ours for one in self.measured if one.ours.ratio == 0), None)


def check_place(file: Path) -> None:
    """Raises InvalidInput if no card can be written there: better before than after the measurement."""
    if not os.access(file.absolute().parent, os.W_OK) or file.is_dir():
        raise InvalidInput(f"--card {file} cannot be written: name a file in a directory that exists and is yours")


def write_card(file: Path, made: Measurement, advised: str) -> bool:
    """Write the card, and beside it the curve; whether it could be drawn. ``advised`` is the advice in words."""
    curve = file.with_suffix(".png") if importlib.util.find_spec("matplotlib") else None
    if curve:
        from blendhub_tools.advice.curve import draw

        draw(made.measured, made.tokens, curve)
    file.write_text("\n".join(_page(made, advised, curve)), encoding="utf-8")
    return curve is not None


def _page(made: Measurement, advised: str, curve: Path | None) -> Iterator[str]:
    served, full = made.served, made.measured[0].full
    name = Path(made.model).name
    right = f"; full prefill's are right in {agreed(full, RIGHT)[1]}" if made.has_answers else ""
    yield f"# What reuse costs {name}"
    yield ""
    for what, value in (
        ("model", f"`{made.model}`"),
        ("dtype", served.dtype),
        (
            "data",
            f"`{made.data.name}`, {len(full.scores)} questions, prompts of {served.prompt_tokens:,} tokens (median)",
        ),
        ("answers", f"greedy, at most {made.tokens} tokens{right}"),
        ("chat template", "the tokenizer's" if served.has_template else "none: the tokenizer has none"),
        ("time to first token of full prefill", f"{statistics.median(full.first_token_s):.3f} s (median)"),
        ("measured", f"{datetime.now(UTC):%Y-%m-%d}, {served.device}, vLLM {served.vllm}, BlendHub {__version__}"),
    ):
        yield f"- **{what}**: {value}"
    yield ""
    yield (
        "Every document was computed alone, and is reused at another place. Each answer is made to say full prefill's "
        f"own tokens. *First token* and *{made.tokens} tokens*: the share of the answers in which greedy decoding says "
        "these, too. *Nats lost*: how much less likely full prefill's answer is. *Won back*: the share of what is lost "
        "at ratio 0. *KL*: of the first token. *Right*: the share of full prefill's right answers that stay as they "
        "are. In brackets: 95% intervals."
    )
    yield ""
    columns = list(head(made.tokens))
    for row in (columns, ["---"] * len(columns), *(cells(one, made.reuse) for one in made.measured)):
        yield "| " + " | ".join(row) + " |"
    yield ""
    if curve:
        yield f"![agreement and loss by what is recomputed]({curve.name})"
        yield ""
    yield advised
    yield ""
