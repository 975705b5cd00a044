"""`blendhub advise` with a real vLLM: it measures, and advises what holds."""

import json
import random
import shutil

import pytest

from blendhub.cli import main
from blendhub.vllm.settings import read_settings
from harness.engines.engine import ENVIRONMENT
from tests.vllm.test_settings import HOST
from tests.word_model import WORDS, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_what_holds_an_agreement_is_found_and_its_configuration_is_one_that_vllm_takes(
    model, tmp_path, monkeypatch, capsys
):
    """With everything recomputed each prompt agrees; with random weights hardly one does with little."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    chatting = tmp_path / "model"
    shutil.copytree(model, chatting)
    make_tokenizer(chatting, chat_template="{{ bos_token }} user : {{ messages[0]['content'] }} </s> model :")
    words, spoken = random.Random(1), list(WORDS)[3:]
    texts = [" ".join(words.choices(spoken, k=150)) for _ in range(4)]
    questions = [
        {"documents": [texts[(n + k) % 4] for k in range(3)], "question": " ".join(words.choices(spoken, k=9))}
        for n in range(10)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "distributed_executor_backend": "uni"}
    options = {
        "model": str(chatting),
        "data": str(tmp_path / "data.jsonl"),
        "card": str(tmp_path / "card.md"),
        "engine": json.dumps(engine),
        "settings": json.dumps({"hub": {"arena_gib": 0.25}, "selector": {"name": "first_k", "options": {"k": 0}}}),
        "selectors": "first_k",
        "ratios": "0,0.05,1",
        "agreement": "0.7",
        "tokens": "3",
    }
    code = main(["advise", *(part for name, value in options.items() for part in (f"--{name}", value))])
    printed = capsys.readouterr().out
    assert "10 prompts, each answered in full, and with first_k at 0,0.05,1\n" in printed and "too few" not in printed
    rows = [
        [cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("| first_k ")
    ]
    assert [(row[2], row[4]) for row in rows] == [("0", "10"), ("0.05", "10"), ("1", "10")], printed
    assert [row[3] for row in (rows[0], rows[2])] == ["0%", "100%"], printed
    assert rows[2][6].startswith("100.0% ") and not rows[1][6].startswith("100.0% "), printed
    said = "first_k with recompute_ratio 1 agreed on all 3 tokens of the answer in 10 of 10 prompts"
    assert code == 0 and said in printed
    (flag,) = [line for line in printed.splitlines() if line.startswith("--kv-transfer-config")]
    config = json.loads(flag.removeprefix("--kv-transfer-config '").removesuffix("'"))
    chosen = read_settings(config["kv_connector_extra_config"], HOST, "cpu")
    assert (chosen.selector.options, chosen.recompute_ratio, chosen.hub.arena_gib) == ({"k": 0}, 1.0, 0.25)
    page = (tmp_path / "card.md").read_text()
    assert said in page and flag in page and "| first_k | 1 | 100% | 10 | 100.0% | 100.0%" in page
