"""``blendhub check --only settings``: the first mistake of a --kv-transfer-config, in the words of vLLM's start."""

import io
import json
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from blendhub.cli import main
from blendhub.vllm.transfer_config import TransferConfig

WHERE = "kv_connector_extra_config.blendhub"
FINE = "no mistakes; blended KV is stored, too, if the arena holds 4 prompts of max_model_len: vLLM's log says whether"


def config(blendhub: object = None, **more: object) -> dict:
    extra = {} if blendhub is None else {"kv_connector_extra_config": {"blendhub": blendhub}}
    return {"kv_connector": "BlendHubConnector", "kv_role": "kv_both", **extra, **more}


@pytest.fixture
def checked(capsys):
    """The command's exit code, and what it says."""

    def run(argument: object, *options: str) -> tuple[int, str]:
        given = argument if isinstance(argument, str) else json.dumps(argument)
        code = main(["check", given, "--only", "settings", *options])
        (line,) = capsys.readouterr().out.splitlines()
        return code, line[20:]

    return run


@pytest.mark.parametrize(
    "blendhub, more, line",
    [
        (None, {}, FINE),
        ({"selector": {"name": "first_k", "options": {"k": 3}}, "hub": {"store": {}}}, {"kv_port": 3}, FINE),
        ({}, {"kv_role": "kv_consumer"}, "no mistakes; blended KV is not stored: kv_role is kv_consumer"),
    ],
)
def test_what_is_right_is_called_so_and_whether_blended_kv_is_stored(checked, blendhub, more, line):
    assert checked(config(blendhub, **more)) == (0, line)


@pytest.mark.parametrize(
    "argument, complaint",
    [
        ("[]", "Expected a mapping of names to values, got []"),
        ('{"kv_connector": "B', "the configuration is not JSON: Input data was truncated"),
        ({"kv_conector": "BlendHubConnector"}, "(did you mean 'kv_connector'?)"),
        (config(kv_role="kv_bth"), "(did you mean 'kv_both'?)"),
        (config(kv_connector_extra_config={"mode": "off"}), f"; write it into {WHERE}"),
        (config({"mode": "exct"}), f"{WHERE}: Invalid enum value 'exct' - at `$.mode` (did you mean 'exact'?)"),
        (
            config({"matchers": [{"name": "prefix"}, {"name": "rolling_hash", "options": {"min_match_token": 3}}]}),
            f"{WHERE}.matchers[1]: matcher 'rolling_hash': Object contains unknown field `min_match_token` (did you",
        ),
        (
            config({"endpoint": "ipc:///x", "hub": {"arena_gib": 1}}),
            f"{WHERE}.endpoint names a hub that runs by itself, so {WHERE}.hub.arena_gib would change nothing",
        ),
    ],
)
def test_a_mistake_is_named_with_the_path_of_its_key(checked, argument, complaint):
    """That vLLM's start says the same, vllm/test_check_and_start.py has."""
    code, line = checked(argument)
    assert code == 1 and complaint in line


def test_the_device_that_vllm_runs_on_is_looked_for_if_it_is_named(checked):
    assert checked(config(), "--device", "cuda") == (0, FINE), "installed, if without a GPU"
    assert checked(config(), "--device", "hmm") == (1, f"{WHERE}.device: no device 'hmm'; installed: cpu, cuda, npu")
    assert checked(config({"device": {"name": "cpu"}}), "--device", "hmm") == (0, FINE)


def test_files_and_standard_input_are_read_like_the_flag_itself(checked, capsys, tmp_path, monkeypatch):
    wrong = json.dumps(config({"selector": {"name": "hkdv"}}))
    monkeypatch.setattr("sys.stdin", io.StringIO(wrong))
    (tmp_path / "flag.json").write_text(wrong)
    for argument in ("-", str(tmp_path / "flag.json")):
        assert "no selector 'hkdv'" in checked(argument)[1]
    # What is not there is no mistake of the configuration.
    assert main(["check", str(tmp_path / "nothing.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_vllm_s_own_keys_are_those_of_vllm():
    vllm = pytest.importorskip("vllm.config", reason="needs vLLM; `make setup` installs it")
    assert set(TransferConfig.__struct_fields__) == {field.name for field in fields(vllm.KVTransferConfig)}
    config: Any = msgspec.inspect.type_info(TransferConfig)
    for role in config.fields[1].type.values:
        assert vllm.KVTransferConfig(kv_connector="BlendHubConnector", kv_role=role).kv_role == role
