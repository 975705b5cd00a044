"""The rows that sum up a service: what is lost of vLLM's own answers, and the time and the work that are left."""

import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.quality.workloads import Tokens
from benchmarks.report import Row, row, share_row


class Said(msgspec.Struct):
    """An engine's answer."""

    text: str
    tokens: Tokens
    is_right: bool
    margins: list[float]
    """For each token, the log-probability of the likeliest token less that of the second one."""
    first_token_s: float
    seconds: float
    """Until the answer was whole."""
    computed: int
    """Tokens of the prompt that were computed."""
    repaired: int
    """Tokens that were computed anew, while the answer was written or behind its end."""
    doubt: dict[str, Any] | None = None
    """What the report says of doubt."""


class Asked(msgspec.Struct):
    """A question, and the answers: vLLM's own first."""

    service: str
    kind: str
    prompt_tokens: int
    said: list[Said] = []


def rows(asked: Sequence[Asked], settings: Sequence[dict[str, Any]], kept: float, time: float | None) -> Iterator[Row]:
    """The rows of one service. ``kept``: the bar for right answers that stay right. ``time``: the bar for the time of
    later questions."""
    service = asked[0].service
    for number, chosen in enumerate(settings, 1):
        suffix, how = "" if number == 1 else f"_{number}", json.dumps(chosen) if chosen else "default settings"
        for kind in ("", *dict.fromkeys(question.kind for question in asked)):
            right = [question.said for question in asked if kind in ("", question.kind) and question.said[0].is_right]
            what = f"{how}: share of vLLM's own right answers{kind and f' ({kind})'} that stay right"
            id = "_".join(filter(None, [service, "kept", kind]))
            yield share_row(f"{id}{suffix}", what, [said[number].is_right for said in right], None if kind else kept)
        pairs = [(question.said[0], question.said[number]) for question in asked]
        late = pairs[len(pairs) // 2 :]
        right_of_all = [sum(said.is_right for said in of_engine) for of_engine in zip(*pairs, strict=True)]
        what = f"{how}: right answers of {len(asked)}; vLLM's own: {right_of_all[0]}"
        yield row(f"{service}_right{suffix}", what, "", [right_of_all[1]])
        same = [theirs.text == ours.text for theirs, ours in pairs]
        yield share_row(f"{service}_same{suffix}", f"{how}: share of all answers that are the same text", same)
        first = [ours.first_token_s / theirs.first_token_s for theirs, ours in pairs]
        what = f"{how}: time to the first token, relative to vLLM's own"
        yield row(f"{service}_first_token{suffix}", what, "x", first, better="lower")
        worst = [float(np.quantile(first, 0.95))]
        yield row(f"{service}_first_token_95{suffix}", f"{what}: 95th percentile", "x", worst, better="lower")
        what = f"{how}: time of a question"
        relative = "relative to vLLM's own"
        times, late_times = ([ours.seconds / theirs.seconds for theirs, ours in part] for part in (pairs, late))
        yield row(f"{service}_time{suffix}", f"{what} in the second half, {relative}", "x", late_times, time, "lower")
        yield row(f"{service}_time_all{suffix}", f"{what}, {relative}", "x", times, better="lower")
        means = [statistics.mean(said.seconds for said in of_engine) for of_engine in zip(*pairs, strict=True)]
        what = f"{what}: mean, relative to vLLM's own of {means[0]:.2f} s"
        yield row(f"{service}_time_mean{suffix}", what, "x", [means[1] / means[0]], better="lower")
        for id, part, when in (("computed", pairs, ""), ("computed_late", late, " in the second half")):
            whole = sum(theirs.computed for theirs, _ in part)
            what = f"{how}: tokens of prompts computed{when}, relative to vLLM's own {whole:,}"
            computed = sum(ours.computed for _, ours in part) / whole
            yield row(f"{service}_{id}{suffix}", what, "x", [computed], better="lower")
        what = f"{how}: tokens computed for prompts and repairs, relative to vLLM's own of prompts"
        worked = sum(ours.computed + ours.repaired for _, ours in pairs) / sum(theirs.computed for theirs, _ in pairs)
        yield row(f"{service}_computed_and_repaired{suffix}", what, "x", [worked], better="lower")
