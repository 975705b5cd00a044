"""The pattern of agents in a log: conversations that go on, but with their old tool results cleared."""

import json
import random
from pathlib import Path

import msgspec
from blendhub_tools.analysis.edits import SLACK, Edits
from blendhub_tools.analysis.findings import Findings

from blendhub.cli import main
from blendhub.core.spans import Match, Span


def test_cleared_tool_results_are_named_with_the_share_that_moves(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random_ = random.Random(1)
    texts = [" ".join(f"word{random_.randrange(10**6)}" for _ in range(40)) for _ in range(12)]
    for cleared in (True, False):
        lines = []
        for turn in range(3, len(texts)):
            results = [("[cleared]" if cleared and at < turn - 2 else one) for at, one in enumerate(texts[:turn])]
            messages = [{"role": "system", "content": texts[0]}, {"role": "user", "content": "go on"}]
            lines.append(json.dumps({"messages": [*messages, *({"role": "tool", "content": one} for one in results)]}))
        Path("log").write_text("\n".join(lines))
        assert main(["analyze", "log", "--bytes", "--json"]) == 0
        edits = msgspec.json.decode(capsys.readouterr().out, type=Findings).edits
        assert main(["analyze", "log", "--bytes"]) == 0
        shown = capsys.readouterr().out
        assert ("of your tokens stand behind an edit" in shown) == cleared
        if cleared:
            assert edits.requests == len(lines) - 1 and edits.behind > 0.2 and edits.moved > 0.8
            assert f"{edits.moved:.0%} of these tokens move" in shown
        else:
            assert edits.requests == 0


def test_only_what_follows_the_first_change_counts_and_only_if_it_was_seen():
    edits = Edits(most=2)
    moved = Match(Span(150, 250), 1, 300, False)
    edits.add(1, 300, 0, [moved])
    assert edits.prompts == 0, "the first prompt of a conversation is no edit"
    edits.add(1, 310, 300 - SLACK, [moved])
    assert edits.prompts == 0, "it goes on as it was, but for what a template adds"
    edits.add(1, 300, 100, [Match(Span(0, 100), 1, 0, True), moved, Match(Span(260, 290), 2, 0, False)])
    assert (edits.prompts, edits.behind, edits.moved) == (1, 190, 130)
    edits.add(1, 300, 100, [Match(Span(0, 100), 1, 0, True)])
    assert edits.prompts == 1, "nothing behind it was seen before"
    for conversation in (2, 3, 1):
        edits.add(conversation, 300, 0, [moved])
    assert edits.prompts == 1, "a conversation that was silent for long is forgotten"
