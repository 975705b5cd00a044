"""``blendhub explain``: of a request, of a response's body, and of a prompt that is not run."""

import io
import json
import re
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from blendhub.cli import main
from blendhub.client.hub_client import HubClient
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Match, Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.outcome.fates import LETTERS, Fate, Stretch, in_parts, shortened
from blendhub.outcome.reasons import Why
from blendhub.outcome.report import DoubtOutcome
from tests.outcomes import outcome

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=128)
DOCUMENT = np.arange(1000, 1256, dtype=np.uint32)
SPANS = {"exact": [Span(8, 24)], "holes": [Span(24, 28)], "moved": [Span(28, 72)], "recomputed": [Span(28, 36)]}
SOURCES = [Match(Span(8, 24), 11, 8, True), Match(Span(28, 72), 12, 4, False)]
STRIP = "V" * 8 + "=" * 16 + "o" * 4 + "r" * 8 + ">" * 36 + "." * 8


@pytest.fixture(scope="module")
def hub() -> Iterator[HubInThread]:
    with HubInThread(HubConfig(arena_gib=0.01, metrics="")) as running:
        yield running


@pytest.fixture(scope="module")
def client(hub) -> Iterator[HubClient]:
    """An engine that has computed a document, and has reported a request."""
    with hub.connect() as engine:
        engine.register("an-engine", Namespace(model="a-model", layout=LAYOUT), rank=0)
        reserved = engine.reserve(DOCUMENT, Span(0, len(DOCUMENT))).result()
        engine.commit(reserved.right, len(DOCUMENT)).result()
        whys = {Why.NOTHING_STORED: [Span(0, 80)], Why.LAST: [Span(79, 80)]}
        doubt = DoubtOutcome(9, 0.25, False, 0.1, 1.5, 2)
        reported = msgspec.structs.replace(outcome("cmpl-9-0-abcdefgh", 80, 8, SPANS, SOURCES, whys=whys), doubt=doubt)
        engine.report([reported]).result()
        engine.report([outcome("cmpl-8-0-abcdefgh", 80, 0, {}, reason="the hub has too little of it")]).result()
        yield engine


@pytest.fixture
def explain(hub, client, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        assert main(["explain", *arguments, "--endpoint", hub.endpoint]) == 0
        return capsys.readouterr().out

    return run


def test_a_request_is_shown_with_its_strip_its_counts_its_sources_and_why_it_was_not_reused(explain):
    lines = explain("cmpl-9").splitlines()
    assert lines[:2] == ["cmpl-9-0-abcdefgh: 80 tokens, engine an-engine", STRIP]
    counts = [line.split(maxsplit=3) for line in lines[2:]]
    assert any(line[:3] == ["r", "8", "10%"] and "recomputed: reused text that" in line[3] for line in counts)
    words = [" ".join(line.split()) for line in lines]
    assert "8 to 24 11 8 to 24 exact" in words and "28 to 72 12 4 to 48 moved" in words
    at = next(number for number, line in enumerate(lines) if line.endswith("why it was not reused"))
    assert [re.split(r"  +", line.strip()) for line in lines[at + 1 : -1]] == [
        ["24 to 28", "4", Why.NOTHING_STORED.message],
        ["72 to 79", "7", Why.NOTHING_STORED.message],
        ["79 to 80", "1", Why.LAST.message],
    ]
    assert lines[-1] == (
        "doubt: 2 tokens in doubt did not wait; token 9 of the answer had a margin of 0.25 nats, and waited 1.50 s for "
        "exact KV, from which the model says another token"
    )
    assert explain("cmpl-8").splitlines()[-1] == "why: the hub has too little of it"
    outcome = json.loads(explain("cmpl-9", "--json"))
    assert outcome["spans"]["exact"] == [[8, 24]] and outcome["engine_tokens"] == 8 and "text" not in outcome
    assert outcome["unused"] == [[[0, 80], "nothing_stored"], [[79, 80], "last"]]


def body(**report: object) -> str:
    counts = {"engine": 8, "exact": 16, "moved": 44, "recomputed": 8, "hole": 4, "settled": 0}
    report |= {f"{name}_tokens": number for name, number in counts.items()}
    return json.dumps({"id": "cmpl-9", "usage": {"prompt_tokens": 80}, "kv_transfer_params": {"blendhub": report}})


def test_a_response_that_was_asked_to_explain_needs_no_hub(explain, capsys, monkeypatch):
    spans = {name: [[span.start, span.end] for span in some] for name, some in SPANS.items()}
    monkeypatch.setattr(sys, "stdin", io.StringIO(body(spans=spans)))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "-", "--endpoint", "ipc:///nowhere/hub.sock"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["cmpl-9: 80 tokens", STRIP]
    # Without positions, the hub is asked for the request.
    assert explain("-", stdin=body()).splitlines()[1] == STRIP


def test_a_prompt_shows_what_would_be_reused_of_it_now(explain, tmp_path):
    ids = [*range(64), *DOCUMENT.tolist(), *range(5000, 5064)]
    shown = set()
    for form in (json.dumps(ids), " ".join(map(str, ids)), json.dumps({"prompt_token_ids": ids})):
        (tmp_path / "ids").write_text(form)
        shown.add(explain("--token-ids", str(tmp_path / "ids")))
    (lines,) = (text.splitlines() for text in shown)
    assert lines[0] == "384 tokens, if engine an-engine got them now"
    # 64 of 384 tokens are a sixth of the 80 letters.
    assert lines[1].strip("o.").strip(">") == "" and 52 <= lines[1].count(">") <= 55
    (source,) = (line for line in lines if line.endswith("moved"))
    assert source.split()[:3] == ["64", "to", "320"] and source.endswith("0 to 256  moved")
    assert [re.split(r"  +", line.strip())[::2] for line in lines[-2:]] == [
        ["0 to 64", Why.NOTHING_STORED.message],
        ["320 to 384", Why.NOTHING_STORED.message],
    ]


@pytest.mark.slow
def test_a_prompt_in_words_is_tokenized_as_the_engine_does(explain, tmp_path):
    transformers = pytest.importorskip("transformers", reason="it comes with vLLM; `make setup` installs it")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(2000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "prompt").write_text(" ".join(f"w{n}" for n in DOCUMENT.tolist()))
    lines = explain("--prompt-file", str(tmp_path / "prompt"), "--tokenizer", str(tmp_path / "tokenizer")).splitlines()
    assert lines[0].startswith("256 tokens") and lines[1] == "=" * 80


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["cmpl-unknown"], "the hub has no report of the request 'cmpl-unknown'"),
        ([], "name one: a request's id"),
        (["--token-ids", "/nowhere"], "cannot read /nowhere: No such file or directory"),
        (["--token-ids", __file__], "holds no token ids"),
        (["--token-ids", "IDS", "--engine", "another"], "no engine 'another' is registered; name one of: an-engine"),
        (["-"], "standard input is not a response with a report of BlendHub"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(hub, client, capsys, monkeypatch, tmp_path, arguments, complaint):
    (tmp_path / "ids").write_text("1 2")
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"id": "x"}'))
    arguments = [str(tmp_path / "ids") if argument == "IDS" else argument for argument in arguments]
    assert main(["explain", *arguments, "--endpoint", hub.endpoint]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and complaint in error and error.count("\n") == 1


def test_a_strip_in_parts_keeps_the_fate_that_most_of_each_part_has():
    plan = [Stretch(Span(0, 60), Fate.MOVED), Stretch(Span(60, 70), Fate.HOLE), Stretch(Span(70, 100), Fate.COMPUTED)]
    assert "".join(LETTERS[one.fate] for one in in_parts(plan, 10)) == ">>>>>>o..."
    assert "".join(LETTERS[one.fate] for one in in_parts(plan, 4)) == ">>>."
    assert len(in_parts(plan, 1000)) == 100 and in_parts([], 10) == []
    assert shortened(plan, 3) == plan
    assert shortened(plan, 2) == [Stretch(Span(0, 50), Fate.MOVED), Stretch(Span(50, 100), Fate.COMPUTED)]
