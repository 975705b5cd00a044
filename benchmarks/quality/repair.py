"""What repair does to answers and to times. Each prompt has other documents than all others, and one question.

Answers are made to say the tokens of full prefill's, so that they can be compared at each. All times are taken in one
engine, of requests with repair and without in turn.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from blendhub_tools.advice import forced
from blendhub_tools.advice.judge import LOGPROBS, divergence

from benchmarks.quality.serving import PLAIN, SETTINGS, Serving, reported
from benchmarks.quality.workloads import LONGEST, WORKLOADS, Chat, Tokens, visits
from benchmarks.report import Row, row
from benchmarks.timing import progress, ratios
from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.vllm.scheduler.repair_pace import ON_CPUS
from harness.engines import Engine

ANSWER_TOKENS, TOKENS_BESIDE, STREAMS = 128, 32, 3
SHARES = (ON_CPUS.share, 2.0)
SMOOTHED = 16
"""The tokens over which the picture's curves are means."""
COLOURS = ("#D55E00", "#0072B2", "#009E73")
"""Okabe and Ito's, which people of every colour vision tell apart."""
NEARLY_EXACT = 1e-5
"""Where the picture ends: nothing less can be seen in an answer."""


class Answered(msgspec.Struct):
    """An answer beside full prefill's, and what it did to others."""

    kl: list[float]
    """The divergence at each token of the answer."""
    differences: list[float]
    """Of each token's log-probability."""
    exact_from: int | None
    """The first token that follows from exact KV, counted from 1; None if the repair ended behind the answer."""
    next_turn_kl: float
    first_token_s: float
    gaps_s: list[float]
    """Between tokens of other requests, while an answer to the same prompt was written."""


class Asked(msgspec.Struct):
    workload: str
    share: float
    """The setting ``repair_share``."""
    off: Answered
    repaired: Answered


def run(model: Path, prompts: int, workloads: Sequence[str]) -> Iterator[Asked]:
    """So many prompts of each workload, with each share."""
    from transformers import AutoTokenizer

    chat = Chat(AutoTokenizer.from_pretrained(model))
    cases = {name: [*islice(WORKLOADS[name](chat), max(2, prompts))] for name in workloads}
    seen = [visit for of_workload in cases.values() for visit in visits(of_workload, until_deep=True)]
    each = [(name, of_workload[number]) for number in range(prompts) for name, of_workload in cases.items()]
    options = PLAIN | forced.OPTIONS | {"max_model_len": LONGEST + 1024}
    with tempfile.TemporaryDirectory(prefix="blendhub-quality-") as place:
        serving = Serving(str(model), Path(place), sum(map(len, seen)), **options)
        for share in SHARES:
            policy = SETTINGS["policy"] | {"min_donor_context": MIN_DONOR_CONTEXT}
            with serving.storing(policy=policy, repair_share=share) as engine:
                for prompt in progress(seen, "repair: compute the documents"):
                    engine.one(prompt)
                    engine.forget()
                for number, (name, case) in enumerate(progress(each, f"repair: repair_share {share:g}")):
                    prompt, turn = case.body + case.questions[0].tokens, case.questions[-1].tokens
                    answers = compare(engine, prompt, turn, ("off", "idle") if number % 2 else ("idle", "off"))
                    yield Asked(name, share, answers["off"], answers["idle"])


def compare(engine: Engine, prompt: Tokens, turn: Tokens, ways: Sequence[str]) -> Mapping[str, Answered]:
    """The answers with these settings of ``repair``, each followed by another turn."""
    asked = {"store": False, "logprobs": LOGPROBS}
    engine.forget()
    full = engine.one(prompt, ANSWER_TOKENS, mode="off", **asked)
    next_prompt = prompt + full.tokens + turn
    (next_token,) = engine.one(next_prompt, mode="off", **asked).logprobs
    answers, streams = {}, [turn + [number] * 8 for number in range(1, 1 + STREAMS)]
    for repair in ways:
        engine.forget()
        answer = engine.one(prompt, ANSWER_TOKENS, repair=repair, forced=full.tokens, **asked)
        (ours_next,) = engine.one(next_prompt, repair=repair, **asked).logprobs
        engine.forget()
        beside = engine.beside(streams, None, prompt, TOKENS_BESIDE, repair=repair, store=False)
        gaps_s = np.array(beside.gaps_s)
        at_each = list(zip(full.tokens, full.logprobs, answer.logprobs, strict=True))
        answers[repair] = Answered(
            kl=[divergence(before, after) for _, before, after in at_each],
            differences=[abs(before[token] - after[token]) for token, before, after in at_each],
            exact_from=reported(answer).get("repair", {}).get("exact_from"),
            next_turn_kl=divergence(next_token, ours_next),
            first_token_s=answer.first_token_s,
            # The step of the first token, which ends at about that time, is no part of them: it computes the question.
            gaps_s=gaps_s[np.cumsum(gaps_s) - gaps_s / 2 > beside.answer.first_token_s].tolist(),
        )
    return answers


def rows(asked: Sequence[Asked]) -> Iterator[Row]:
    for share in dict.fromkeys(one.share for one in asked):
        yield from _rows_of([one for one in asked if one.share == share], share)


def _rows_of(asked: Sequence[Asked], share: float) -> Iterator[Row]:
    suffix, how = "" if share == SHARES[0] else f"_share_{share:g}", f"repair_share {share:g}, {len(asked)} prompts"
    off, repaired = [one.off for one in asked], [one.repaired for one in asked]
    worst = [max(answer.differences[answer.exact_from - 1 :]) for answer in repaired if answer.exact_from]
    what = f"{how}: log-probabilities of answer tokens, from where the report says that they follow from exact KV"
    what += f", the largest difference of {len(worst)} answers"
    yield row(f"repair_exact{suffix}", what, "nats", [max(worst)] if worst else [], 1e-3, "lower")
    what = f"{how}: the token from which on an answer follows from exact KV; {ANSWER_TOKENS + 1}: none"
    since = [answer.exact_from or ANSWER_TOKENS + 1 for answer in repaired]
    yield row(f"repair_exact_from{suffix}", what, "", since, better="lower")
    kl = np.array([[np.mean(answer.kl) for answer in (one.repaired, one.off)] for one in asked])
    draws = kl[np.random.default_rng(0).integers(0, len(asked), (400, len(asked)))].sum(1)
    low, high = np.quantile(draws[:, 0] / draws[:, 1], [0.025, 0.975])
    mean, mean_off = kl.mean(0)
    what = f"{how}: mean KL of answer tokens 1 to {ANSWER_TOKENS}, relative to without repair ({mean_off:.3g} nats)"
    yield row(f"repair_kl_128{suffix}", what, "x", [mean / mean_off], 0.35, "lower", (float(low), float(high)))
    most_off = max(answer.next_turn_kl for answer in off)
    what = f"{how}: KL of the next turn's first token, the largest; without repair {most_off:.3g}"
    most = max(answer.next_turn_kl for answer in repaired)
    yield row(f"repair_next_turn{suffix}", what, "nats", [most], 1e-3, "lower")
    times, times_off = ([answer.first_token_s for answer in answers] for answers in (repaired, off))
    what = f"{how}: time to first token, relative to without repair"
    yield row(f"repair_ttft{suffix}", what, "x", ratios(times, times_off), 1.02, "lower")
    for id, kind, gap in (("", "median", statistics.median), ("_longest", "longest", max)):
        gaps, gaps_off = ([float(gap(answer.gaps_s)) for answer in answers] for answers in (repaired, off))
        what = f"{how}: {kind} time between tokens of {STREAMS} other requests, relative to without repair"
        yield row(f"repair_gap{id}{suffix}", what, "x", ratios(gaps, gaps_off), None if suffix else 1.6, "lower")


def draw(asked: Sequence[Asked], file: Path) -> None:
    """The KL of each token, without repair and with each share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    FigureCanvasAgg(figure := Figure(figsize=(4.6, 3.2), layout="constrained"))
    axes = figure.add_subplot(xlabel="token of the answer", ylabel="KL to full prefill, nats", yscale="log")
    curves = {"without repair": [one.off for one in asked if one.share == SHARES[0]]}
    for share in SHARES:
        curves[f"with repair, repair_share {share:g}"] = [one.repaired for one in asked if one.share == share]
    for (label, answers), colour in zip(curves.items(), COLOURS, strict=True):
        kl = np.mean([answer.kl for answer in answers], 0)
        smooth = np.convolve(kl, np.full(SMOOTHED, 1 / SMOOTHED), "valid")
        axes.plot(np.arange(len(smooth)) + (SMOOTHED + 1) / 2, smooth, color=colour, label=label)
    axes.set_ylim(NEARLY_EXACT, 10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(file, dpi=150)
