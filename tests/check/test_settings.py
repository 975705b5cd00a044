"""Every mistake of a --kv-transfer-config at once, and no others than vLLM's start would name."""

import io
import json
import resource
import subprocess
import sys
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from blendhub import PluginHost
from blendhub.cli import main
from blendhub.core.errors import BlendHubError
from blendhub.vllm.settings import mistakes_in_settings, read_settings
from blendhub.vllm.transfer_config import TransferConfig

HOST = PluginHost.discover()
WHERE = "kv_connector_extra_config.blendhub"
FINE = "no mistakes; blended KV is stored, too, if the arena holds 4 prompts of max_model_len: vLLM's log says whether"


def config(blendhub: object = None, **more: object) -> dict:
    extra = {} if blendhub is None else {"kv_connector_extra_config": {"blendhub": blendhub}}
    return {"kv_connector": "BlendHubConnector", "kv_role": "kv_both", **extra, **more}


def checked(capsys, argument: object, *options: str) -> tuple[int, list[str]]:
    given = argument if isinstance(argument, str) else json.dumps(argument)
    code = main(["check", given, "--only", "settings", *options])
    return code, [line[20:] for line in capsys.readouterr().out.splitlines()]


def test_what_is_right_is_called_so(capsys):
    assert checked(capsys, config()) == (0, [FINE])
    chosen = {"selector": {"name": "first_k", "options": {"k": 3}}, "hub": {"store": {}, "arena_gib": 2}}
    assert checked(capsys, config(chosen, kv_port=3, kv_load_failure_policy="fail")) == (0, [FINE])


@pytest.mark.parametrize(
    "blendhub, more, what",
    [
        ({"store_blended": True}, {}, "is stored, too"),
        ({"store_blended": False}, {}, "is not stored: store_blended is false"),
        ({"matchers": [{"name": "separator", "options": {"separator": [7]}}]}, {}, "(separator) finds prefixes; add"),
        ({}, {"kv_role": "kv_consumer"}, "is not stored: kv_role is kv_consumer"),
    ],
)
def test_it_says_whether_blended_kv_is_stored_and_why_not(capsys, blendhub, more, what):
    code, (line,) = checked(capsys, config(blendhub, **more))
    assert code == 0 and line.startswith("no mistakes; blended KV ") and what in line


MISTAKES = [
    ({"kv_conector": "BlendHubConnector"}, "has no option 'kv_conector' (did you mean 'kv_connector'?)"),
    ({"kv_role": "kv_bth"}, "it can be 'kv_both', 'kv_consumer', 'kv_producer' (did you mean 'kv_both'?)"),
    ({"kv_connector": "BlendHub"}, "it can be 'BlendHubConnector' (did you mean 'BlendHubConnector'?)"),
    ({"mode": "exct"}, f"{WHERE}: option mode = 'exct' is not valid"),
    ({"recompute_ration": 1}, f"{WHERE} has no option 'recompute_ration' (did you mean 'recompute_ratio'?)"),
    ({"selector": {"name": "hkdv"}}, f"{WHERE}.selector: no selector 'hkdv' (did you mean 'hkvd'?)"),
    ({"device": {"name": "tpu", "optons": 1}}, f"{WHERE}.device has no option 'optons' (did you mean 'options'?)"),
    ({"device": {"name": "tpu", "optons": 1}}, f"{WHERE}.device: no device 'tpu'"),
    (
        {"matchers": ["prefix", {"name": "rolling_hash", "options": {"min_match_token": 3}}, {"nme": "x"}]},
        f"{WHERE}.matchers[0] = 'prefix' is not valid: Expected `object`",
        f"{WHERE}.matchers[1]: matcher 'rolling_hash' has no option 'min_match_token' (did you mean",
        f"{WHERE}.matchers[2] has no option 'nme' (did you mean 'name'?)",
        f"{WHERE}.matchers[2] needs the option 'name'",
    ),
    (
        {"hub": {"arena_gb": 1, "store": {"options": {"path": 3}}, "listen": [{"endpoint": "", "transport": "unxi"}]}},
        f"{WHERE}.hub has no option 'arena_gb' (did you mean 'arena_gib'?)",
        f"{WHERE}.hub.store: store 'disk': option path = 3 is not valid",
        f"{WHERE}.hub.listen[0]: option endpoint = '' is not valid",
        f"{WHERE}.hub.listen[0]: no transport 'unxi' (did you mean 'unix'?)",
    ),
]


def split(case: tuple) -> tuple[dict, dict, list[str]]:
    """What is written beside ``blendhub``, what in it, and what has to be found."""
    written, *found = case
    return (written, {}, found) if next(iter(written)).startswith("kv_") else ({}, written, found)


def test_all_mistakes_are_found_at_once_and_each_once(capsys):
    beside, blendhub = {}, {}
    for case in MISTAKES:
        beside, blendhub = beside | split(case)[0], blendhub | split(case)[1]
    code, lines = checked(capsys, config(blendhub, **beside))
    assert code == 1 and len(lines) == len(set(lines))
    for case in MISTAKES:
        for mistake in split(case)[2]:
            assert sum(mistake in line for line in lines) == 1, mistake


@pytest.mark.parametrize(
    "argument, complaint",
    [
        ("[]", "expected a mapping of keys to values, got []"),
        ('{"kv_connector": "B', "the configuration is not JSON: Unterminated string"),
        ("{}", "kv-transfer-config needs the option 'kv_connector'"),
        (json.dumps(config(kv_connector_extra_config=3)), "option kv_connector_extra_config = 3 is not valid"),
        (json.dumps(config(kv_connector_extra_config={"blendhb": {}})), "(did you mean 'blendhub'?)"),
        (json.dumps(config(kv_connector_extra_config={"mode": "off"})), f"; write it into {WHERE}"),
        (json.dumps(config("blend")), "options must be a mapping of names to values, got 'blend'"),
    ],
)
def test_what_has_another_shape_is_a_mistake_too(capsys, argument, complaint):
    code, lines = checked(capsys, argument)
    assert code == 1 and any(complaint in line for line in lines), lines


def test_the_device_that_vllm_runs_on_is_looked_for_if_it_is_named(capsys):
    assert checked(capsys, config()) == (0, [FINE])
    assert checked(capsys, config(), "--device", "cuda") == (0, [FINE])  # installed, if without a GPU
    code, lines = checked(capsys, config(), "--device", "hmm")
    assert code == 1 and lines == [f"{WHERE}.device: no device 'hmm'; installed: cpu, cuda, npu"]
    assert checked(capsys, config({"device": {"name": "cpu"}}), "--device", "hmm") == (0, [FINE])


@pytest.mark.parametrize("name", ["flag.json", "serve.json", "serve.yaml", "nested.yml", "-"])
def test_files_and_standard_input_are_read_like_the_flag_itself(capsys, tmp_path, monkeypatch, name):
    wrong = config({"selector": {"name": "hkdv"}})
    text = {
        "flag.json": json.dumps(wrong),
        "-": json.dumps(wrong),
        "serve.json": json.dumps({"model": "m", "kv_transfer_config": wrong}),
        "serve.yaml": f"model: m\nkv-transfer-config: '{json.dumps(wrong)}'\n",
        "nested.yml": f"model: m\nkv_transfer_config: {json.dumps(wrong)}\n",
    }[name]
    if name.endswith(("yaml", "yml")):
        pytest.importorskip("yaml", reason="reading YAML needs PyYAML, which comes with vLLM")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    (tmp_path / "file").mkdir()
    (tmp_path / name).write_text(text)
    code, lines = checked(capsys, "-" if name == "-" else str(tmp_path / name))
    assert code == 1
    (line,) = lines
    assert line.startswith(f"{WHERE}.selector: no selector 'hkdv'")


def test_a_file_that_is_not_there_is_no_mistake_of_the_configuration(capsys, tmp_path):
    assert main(["check", str(tmp_path / "nothing.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_it_takes_less_than_a_second_and_imports_nothing_heavy():
    code = """
import sys
from blendhub.cli import main
code = main(["check", sys.argv[1], "--only", "settings", "--only", "plugins"])
sys.exit(code if not {"torch", "vllm", "numba", "zmq"} & sys.modules.keys() else 9)
"""
    took = []
    for _ in range(3):
        before = processor_s()
        assert subprocess.run([sys.executable, "-c", code, json.dumps(config({}))]).returncode == 0
        took.append(processor_s() - before)
    # Not by the clock: others may keep the machine busy.
    assert min(took) < 1.5, took


def processor_s() -> float:
    """What ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_vllm_s_own_keys_are_those_of_vllm():
    vllm = pytest.importorskip("vllm.config", reason="needs vLLM; `make setup` installs it")
    assert set(TransferConfig.__struct_fields__) == {field.name for field in fields(vllm.KVTransferConfig)}
    config: Any = msgspec.inspect.type_info(TransferConfig)
    for role in config.fields[1].type.values:
        assert vllm.KVTransferConfig(kv_connector="BlendHubConnector", kv_role=role).kv_role == role


@pytest.mark.parametrize("case", [case for case in MISTAKES if split(case)[1]], ids=str)
def test_vllm_s_start_refuses_what_the_check_finds_with_the_same_words(case):
    _, blendhub, _ = split(case)
    found = mistakes_in_settings({"blendhub": blendhub}, HOST, "cpu")
    with pytest.raises(BlendHubError) as raised:
        read_settings({"blendhub": blendhub}, HOST, "cpu")
    assert found and all(str(mistake) in str(raised.value) for mistake in found)
