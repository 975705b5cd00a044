"""The pattern of agents in a log: conversations that others made, with their old tool results cleared."""

import json
from pathlib import Path

import msgspec
import pytest
from blendhub_tools.analysis.edits import SLACK, Edits
from blendhub_tools.analysis.findings import Findings

from benchmarks.quality.sources import BFCL, Dialogue, dialogues
from blendhub.cli import main
from blendhub.core.spans import Match, Span

CLEARED = "[cleared]"
WINDOW = 64
"""The default ``min_match_tokens``."""
needs_texts = pytest.mark.skipif(not BFCL.exists(), reason="its texts are a package; `make setup` downloads it")


def prompts(dialogue: Dialogue, keep: int | None) -> list[list[dict]]:
    """The messages of each turn's prompt; with ``keep``, older tool results than so many are cleared."""
    system = {"role": "system", "content": f"Call these functions.\n{dialogue.functions}"}
    found = []
    for number, turn in enumerate(dialogue.turns):
        messages = [system]
        for at, earlier in enumerate(dialogue.turns[:number]):
            is_old = keep is not None and at < number - keep
            messages += [
                {"role": "user", "content": earlier.user},
                {"role": "assistant", "content": earlier.calls},
                {"role": "tool", "content": CLEARED if is_old else earlier.result},
            ]
        found.append([*messages, {"role": "user", "content": turn.user}])
    return found


@pytest.fixture
def analyze(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def analyze(keep: int | None) -> tuple[Findings, str, list[list[dict]]]:
        """Whole dialogues, one after the other: what is found, what is shown, and the log."""
        log = [one for dialogue in dialogues("test")[:25] for one in prompts(dialogue, keep)]
        Path("log").write_text("\n".join(json.dumps({"messages": messages}) for messages in log))
        assert main(["analyze", "log", "--bytes", "--json"]) == 0
        found = msgspec.json.decode(capsys.readouterr().out, type=Findings)
        assert main(["analyze", "log", "--bytes"]) == 0
        return found, capsys.readouterr().out, log

    return analyze


@needs_texts
def test_cleared_tool_results_are_named_with_the_share_that_moves(analyze):
    found, shown, log = analyze(keep=2)
    edits = found.edits
    cleared = sum(map(is_edited, log))
    assert edits.requests == cleared >= 10
    texts = ["".join(f"<|{one['role']}|>\n{one['content']}\n" for one in messages) for messages in log]
    behind = sum(seen_behind_an_edit(texts, at) for at, messages in enumerate(log) if is_edited(messages))
    assert edits.behind == pytest.approx(behind / sum(len(text.encode()) for text in texts), rel=0.02)
    assert edits.behind > 0.03
    assert edits.moved > 0.8
    assert f"{edits.behind:.0%} of your tokens stand behind an edit: {edits.requests:,} prompts" in shown
    assert f"{edits.moved:.0%} of these tokens move" in shown


def is_edited(messages: list[dict]) -> bool:
    return any(one["content"] == CLEARED for one in messages)


def seen_behind_an_edit(texts: list[str], at: int) -> int:
    """By brute force: from the first byte with which no earlier prompt goes on to the last one that was seen before."""
    prompt, earlier = texts[at].encode(), [text.encode() for text in texts[:at]]
    prefix = max(next((n for n, pair in enumerate(zip(prompt, one)) if len({*pair}) > 1), 0) for one in earlier)  # noqa: B905
    known = {one[start : start + WINDOW] for one in earlier for start in range(len(one) - WINDOW + 1)}
    ends = [start + WINDOW for start in range(len(prompt) - WINDOW + 1) if prompt[start : start + WINDOW] in known]
    return max(0, max(ends, default=0) - prefix)


@needs_texts
def test_conversations_that_only_go_on_have_no_edits(analyze):
    found, shown, _ = analyze(keep=None)
    assert found.edits.requests == 0 and found.edits.behind == 0
    assert "behind an edit" not in shown


def test_only_what_follows_the_first_change_counts_and_only_if_it_was_seen():
    edits = Edits(most=2)
    moved = Match(Span(150, 250), 1, 300, False)
    edits.add("a", 300, 0, [moved])
    assert edits.prompts == 0, "the first prompt of a conversation is no edit"
    edits.add("a", 310, 300 - SLACK, [moved])
    assert edits.prompts == 0, "it goes on as it was, but for what a template adds"
    edits.add("a", 300, 100, [Match(Span(0, 100), 1, 0, True), moved, Match(Span(260, 290), 2, 0, False)])
    assert (edits.prompts, edits.behind, edits.moved) == (1, 190, 130)
    edits.add("a", 300, 100, [Match(Span(0, 100), 1, 0, True)])
    assert edits.prompts == 1, "nothing behind it was seen before"
    for name in ("b", "c", "a"):
        edits.add(name, 300, 0, [moved])
    assert edits.prompts == 1, "a conversation that was silent for long is forgotten"
