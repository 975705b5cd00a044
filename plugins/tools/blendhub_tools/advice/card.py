"""What is shown of a measurement: rows of a table in Markdown, on the terminal and in a model card."""

import re
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from blendhub import __version__
from blendhub.outcome.agreement import wilson
from blendhub_tools.advice.answering import Job, Served
from blendhub_tools.advice.choice import agreed, agreement
from blendhub_tools.advice.judge import FIRST, KL, NATS, RIGHT
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy, interval

MIN_LOSS = 0.001


class Measured(msgspec.Struct, frozen=True):
    """One selector at one ratio, beside full prefill by the same engine."""

    ours: Outcome
    full: Outcome
    reuse: Outcome | None
    """The answers with nothing recomputed; None if they were not asked for."""

    def row(self) -> str:
        """The row of the table, with a cell for each column of ``head``."""
        ours, scores = self.ours, accuracy(self.ours)
        same_first, answers = agreed(ours, FIRST)
        moved = [share for share, asked in zip(ours.recomputed, ours.asked, strict=True) if asked[KL]]
        low, high = wilson(*agreed(ours))
        most_lost, least_lost = interval(ours, NATS)
        compared = Comparison(ours, self.full, self.reuse or ours, MIN_LOSS)
        won_back, limits = compared.share([NATS]), compared.interval([NATS])
        first_token_s = statistics.median(ours.first_token_s)
        return _line(
            ours.selector,
            f"{ours.ratio:g}",
            f"{statistics.mean(moved or [0]):.0%}",
            str(answers),
            f"{same_first / answers if answers else 0:.1%}",
            f"{agreement(ours):.1%} ({100 * low:.1f} to {100 * high:.1f})",
            f"{_loss(scores[NATS])} ({_loss(least_lost)} to {_loss(most_lost)})",
            f"{won_back:.2f} ({limits[0]:.2f} to {limits[1]:.2f})" if won_back is not None and limits else "",
            f"{abs(scores[KL]):.3f}",
            f"{scores[RIGHT]:.0%}" if agreed(ours, RIGHT)[1] else "",
            f"{first_token_s:.3f}",
            f"{first_token_s / statistics.median(self.full.first_token_s):.2f}",
        )


def head(tokens: int) -> str:
    """The heads of the columns, where answers have so many tokens."""
    begin = ("selector", "ratio", "computed", "answers", "first token", f"{tokens} tokens", "nats lost", "won back")
    return _line(*begin, "KL", "right", "first token, s", "of full prefill's")


def _loss(nats: float) -> str:
    # Rounded before it is added to 0: no figure is -0.00.
    return f"{0.0 + round(-nats, 2):.2f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def card(job: Job, data: Path, served: Served, measured: Sequence[Measured], advice: str) -> Iterator[str]:
    """The lines of a model card: what reuse costs one model on one file of questions."""
    full = measured[0].full
    right = agreed(full, RIGHT)[1]
    yield f"# What reuse costs {Path(job.model).name}"
    yield ""
    yield f"- **model**: `{job.model}`, {served.dtype}"
    prompts = f"{len(full.scores)} questions, prompts of {served.prompt_tokens:,} tokens (median)"
    yield f"- **data**: `{data.name}`, {prompts}"
    yield (
        f"- **answers**: greedy, at most {job.tokens} tokens"
        + (f"; full prefill's are right in {right}" if right else "")
        + ("" if served.has_template else "; the tokenizer has no chat template")
    )
    yield f"- **first token of full prefill**: after {statistics.median(full.first_token_s):.3f} s (median)"
    versions = f"{served.device}, vLLM {served.vllm}, BlendHub {__version__}"
    yield f"- **measured**: {datetime.now(UTC):%Y-%m-%d}, {versions}"
    yield ""
    yield (
        f"Each document was computed {full.times_computed:.1f} times, once at least behind so much text that its KV "
        "may move, and is reused at another place. Each answer is made to say full prefill's own tokens. "
        f"*First token* and *{job.tokens} tokens*: the share of the answers in which greedy decoding says "
        "these, too. *Nats lost*: how much less likely full prefill's answer is. *Won back*: the share of what is lost "
        "at ratio 0. *KL*: of the first token. *Right*: the share of full prefill's right answers that stay as they "
        "are. In brackets: 95% intervals."
    )
    yield ""
    columns = head(job.tokens)
    yield columns
    yield re.sub("[^|]+", " --- ", columns)
    yield from (comparison.row() for comparison in measured)
    yield ""
    yield advice
