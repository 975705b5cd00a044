"""`blendhub analyze` from its arguments to its report."""

import json
import os
import random
import re
import signal
import string
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from blendhub_tools.analysis.findings import EXACT_COST, MOVED_COST, Findings
from blendhub_tools.analysis.tokenizing import kv_bytes_of

from blendhub import PluginHost
from blendhub.cli import main
from blendhub.vllm.settings import Settings
from blendhub.vllm.transfer_config import check_transfer_config
from examples.help_desk import as_lines
from tests.word_model import make_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer without a chat template, of a model with 2 layers of 2 KV heads of 32."""
    folder = make_tokenizer(tmp_path)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.fixture
def analyze(tmp_path, capsys, monkeypatch):
    """Analyzes one log in a new folder: exit code, what was printed, and what was complained about."""
    monkeypatch.chdir(tmp_path)

    def analyze(content, *arguments):
        Path("log").write_text(content)
        code = main(["analyze", "log", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return analyze


def test_a_log_of_chats_from_end_to_end(analyze):
    code, shown, _ = analyze(as_lines(60), "--bytes")
    assert code == 0
    assert "BlendHub would help" in shown
    code, printed, _ = analyze(as_lines(60), "--bytes", "--json")
    findings = msgspec.json.decode(printed, type=Findings)
    assert code == 0 and findings.anywhere > 0.5 > findings.prefix > 0
    assert f"{findings.anywhere:.1%}" in shown and f"{findings.tokens:,}" in shown
    shares = [arena.anywhere for arena in findings.arenas]
    assert shares == sorted(shares) and shares[-1] == findings.anywhere
    assert findings.advised.anywhere >= 0.95 * findings.anywhere
    (flag,) = re.findall(r"--kv-transfer-config '(.*)'", shown)
    assert json.loads(flag) == findings.config
    check_transfer_config(findings.config, PluginHost.discover(), "cpu")


def test_logs_of_token_ids_need_no_tokenizer(analyze):
    ids = list(range(1000, 1500))
    code, shown, _ = analyze(f"{[1, *ids]}\n{[2, 3, *ids]}\n")
    assert code == 0 and "2 prompts with 1,003 tokens (token ids)" in shown
    assert "anywhere, by the hub             24." in shown, "what stands behind 256 tokens is reused"


def test_a_byte_is_a_quarter_of_a_token_for_the_text_before_a_donor(analyze):
    text = "".join(random.Random(1).choices(string.ascii_letters, k=1500))
    code, shown, _ = analyze(f"1{text}\n23{text}\n", "--bytes")
    assert code == 0 and "anywhere, by the hub             15." in shown, "what stands behind 1,024 bytes is reused"


@pytest.mark.parametrize(
    "content, arguments, complaint",
    [
        ("", ["--bytes"], "log: no prompts, expected one a line"),
        ('{"a": 1}\n', ["--bytes"], "none of 1 lines can be played; the first one, log:1 has none of the keys"),
        ("some text\n", [], "log:1 is text: name the model's tokenizer"),
        ("x\n", ["--bytes", "--tokenizer", "t"], "exclude each other"),
        ("x\n", ["--bytes", "--arena-gib", "0"], "--arena-gib '0' should be numbers above 0"),
        ("x\n", ["--tokenizer", "./nowhere"], "--tokenizer ./nowhere: transformers cannot load it"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(analyze, content, arguments, complaint):
    code, _, error = analyze(content, *arguments)
    assert code == 2 and complaint in error
    assert error.startswith("blendhub: ") and error.count("\n") == 1


def test_without_transformers_it_says_what_to_install(analyze, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, error = analyze("x\n", "--tokenizer", tokenizer)
    assert code == 2 and "pip install 'blendhub[tools]'" in error and "--bytes" in error


def test_a_tokenizer_and_a_chat_template(analyze, tokenizer):
    pytest.importorskip("transformers", reason="only --tokenizer needs it: pip install transformers")
    template = Path("template.jinja")
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.content }} {% endfor %}"
    )
    text = "Anna lives in Rome . " * 40
    chats = [[{"role": "user", "content": text}], [{"role": "tool", "content": text}]]
    log = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats) + json.dumps({"prompt": text}) + "\n"
    code, printed, _ = analyze(log, "--tokenizer", tokenizer, "--chat-template", template, "--json")
    assert code == 0
    findings = msgspec.json.decode(printed, type=Findings)
    assert findings.tokens == 200 + 201, "a prompt begins with a special token, which a template writes itself"
    assert findings.first_broken == ["log:2 the chat template refuses it: no tools"]
    assert (findings.kv_bytes, findings.kv_bytes_assumed) == (2 * 2 * 2 * 32 * 2, False)


def test_arguments_of_tools_are_objects_for_the_template_as_in_vllm(analyze, tokenizer):
    pytest.importorskip("transformers", reason="only --tokenizer needs it: pip install transformers")
    template = Path("template.jinja")
    template.write_text("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Rome " * 40})}}
    log = json.dumps({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
    _, printed, _ = analyze(log, "--tokenizer", tokenizer, "--chat-template", template, "--json")
    findings = msgspec.json.decode(printed, type=Findings)
    assert not findings.broken and findings.tokens == 40


@pytest.mark.parametrize("by_hand", [False, True], ids=["script", "by hand"])
@pytest.mark.slow
def test_ctrl_c_prints_what_was_seen(tmp_path, by_hand):
    """A child of `nohup make test &` inherits that SIGINT is ignored. In a terminal, the command undoes that."""
    handler = "SIG_IGN" if by_hand else "default_int_handler"
    start = f"import signal; signal.signal(signal.SIGINT, signal.{handler}); import blendhub.cli.__main__"
    terminal, stderr = os.openpty() if by_hand else (None, None)
    process = subprocess.Popen(
        [sys.executable, "-c", start, "analyze", "--bytes", "-"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    # More than a pipe holds; it stays open, as `tail -f` leaves it.
    for number in range(500):
        process.stdin.write(json.dumps({"prompt": f"{'the same ' * 30}{number}"}) + "\n")
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    shown = process.stdout.read()
    assert process.wait(30) == 130
    assert "interrupted: this is what was seen until then" in shown and "BlendHub would" in shown
    for file in filter(None, (terminal, stderr)):
        os.close(file)


@pytest.mark.parametrize(
    "config, expected",
    [
        ('{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}', 131072),
        ('{"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}}', 32),
        ('{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}', 61 * 576 * 2),
        ("[]", None),
    ],
)
def test_the_kv_of_a_token_by_the_model_s_config(tmp_path, config, expected):
    file = tmp_path / "config.json"
    file.write_text(config)
    assert kv_bytes_of(file) == expected
    assert kv_bytes_of(tmp_path / "missing") is None


def test_the_costs_of_tokens_are_those_that_were_measured():
    """On a prompt of 3,830 tokens, 64 of which are the question, and seven documents of 512."""
    measurements = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")

    def cost(row, reused):
        (ratio,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| ([\d.]+) x", measurements, re.M)
        return (float(ratio) * 3830 - (3830 - reused)) / reused

    exact = cost("exact prefix, all but the question, relative to full prefill", 3830 - 64)
    moved = cost(f"{Settings().recompute_ratio:.0%} recomputed by the default selector", 7 * 512)
    assert (round(exact, 2), round(moved, 2)) == (EXACT_COST, MOVED_COST)
