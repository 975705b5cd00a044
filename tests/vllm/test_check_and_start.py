"""What ``blendhub check`` calls right, vLLM's start takes, and what it calls wrong, the start refuses: every setting.

Here the start is that of a real connector, which reads its settings, chooses its plugins and starts its hub; tests play
the worker.
"""

import json
from typing import Any

import msgspec
import pytest
from vllm.config import KVTransferConfig, ModelConfig

from blendhub import PluginHost
from blendhub.cli import main
from blendhub.core.errors import BlendHubError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.builtin_plugins import HOMES
from blendhub.framework.options import describe_options
from blendhub.hub.config import Listen, StoreChoice
from blendhub.system.served_vllm import transfer_config
from blendhub.vllm.messages import WorkerReport
from blendhub.vllm.settings import EmbeddedHubConfig, ReusePolicy, Settings
from tests.vllm.byte_pairs import byte_pairs
from tests.vllm.test_scheduler_start import PROOF, config_of, made_in_scheduler, report, steps_until_served

HOST = PluginHost.discover()
HUB = {"arena_gib": 0.01}

SETTINGS: dict[str, Any] = {
    "transport": {"name": "zmq", "options": {"max_pending": 9}},
    "hub": HUB,
    "matchers": [{"name": "prefix"}],
    "device": {"name": "cpu"},
    "selector": {"name": "first_k", "options": {"k": 2}},
    "mode": "contiguous",
    "recompute_ratio": 1,
    "donors": "trusted",
    "policy": {"min_reused_tokens": 1, "min_donor_context": 0},
    "audit_share": 0,
    "expected_agreement": 1.0,
    "repair": "always",
    "repair_share": 0.1,
    "repair_after_s": 0,
    "doubt": 0.3,
    "doubt_pause_s": 2,
    "store": False,
    "store_blended": True,
    "chunk_tokens": 64,
    "lookup_timeout_s": 0.5,
}
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("device", "cpu"): {"block_tokens": 2},
    ("device", "cuda"): {"staging_mib": 1, "block_tokens": 2},
    ("device", "npu"): {"staging_mib": 1, "block_tokens": 2, "fast_ops": False},
    ("matcher", "prefix"): {},
    ("matcher", "rolling_hash"): {"min_match_tokens": 16},
    ("matcher", "separator"): {"separator": " # # ", "min_match_tokens": 4},
    ("selector", "attended"): {"layers": [0.5], "attending_tokens": 4, "window_tokens": 2},
    ("selector", "first_k"): {"k": 0},
    ("selector", "hkvd"): {"signal": "k", "layer": 2, "probe_share": 1, "block_tokens": 4, "window_tokens": 4},
    ("store", "disk"): {"path": "HERE/disk", "capacity_gib": 0.1, "fsync": True},
    ("store", "mooncake"): {"master": "127.0.0.1:1"},
    ("store", "shared_directory"): {"path": "HERE/shared", "catalogue": "redis://127.0.0.1:1", "deadline_s": 0.1},
    ("transport", "inproc"): {"max_pending": 9},
    ("transport", "zmq"): {"max_pending": 9},
}
LISTENING = {"endpoint": "ipc://HERE/own.sock", "transport": "zmq", "options": {"max_pending": 9}}
OF_HUB: dict[str, Any] = {"listen": [LISTENING], "store": {"name": "disk", "options": OPTIONS["store", "disk"]}}
OF_HUB |= {"silence_s": 9, "metrics": "127.0.0.1:0", "embedded": "process"}


def choosing(kind: str, choice: object) -> dict[str, Any]:
    """Settings that choose a plugin."""
    if kind == "matcher":
        return {"hub": HUB, "matchers": [choice, {"name": "prefix"}]}
    return {"hub": HUB | {"store": choice}} if kind == "store" else {"hub": HUB, kind: choice}


def choosing_with(kind: str, name: str, options: object) -> dict[str, Any]:
    return choosing(kind, {"name": name, "options": options})


RIGHT = [
    {},
    SETTINGS,
    {"endpoint": "ipc://HERE/none.sock"},
    {"hub": HUB | OF_HUB},
    *(choosing_with(*plugin, options) for plugin, options in OPTIONS.items()),
    {"transport": {"name": "inproc"}, "hub": HUB | {"embedded": "thread"}},
]
TOO_LONG = f"ipc:///{'x' * 200}"
WRONG: list[dict[str, Any]] = [
    *({"endpoint": wrong} for wrong in ("tcp://x", "/run/hub.sock", "ipc://@abstract", TOO_LONG)),
    *({"hub": HUB | {"listen": [{"endpoint": wrong}]}} for wrong in ("inproc://x", "ipc://", TOO_LONG)),
    {"hub": HUB | {"listen": [LISTENING, LISTENING]}},
    {"hub": HUB | {"listen": [{"endpoint": "ipc://HERE/x", "transport": "tcp"}]}},
    *({"hub": HUB | {"metrics": wrong}} for wrong in ("here", ":1", "localhost:", "127.0.0.1:65536")),
    {"transport": {"name": "inproc"}, "hub": HUB | {"embedded": "process"}},
    {"transport": {"name": "inproc"}, "endpoint": "inproc://x"},
    {"endpoint": "ipc://HERE/none.sock", "hub": HUB},
    *(choosing(kind, {"name": "none_such"}) for kind in ("device", "matcher", "selector", "store", "transport")),
    *(choosing_with("matcher", "separator", {"separator": wrong}) for wrong in ([], [-1], [2**32], ["x"], "")),
    *(choosing_with("selector", "attended", {"layers": wrong}) for wrong in ([1.0], [-0.1])),
    choosing_with("store", "shared_directory", {}),
    choosing_with("store", "shared_directory", {"path": "HERE/shared", "catalogue": "HOST:6379"}),
]


def wrong_values(struct: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Each option with a value that is beyond its bounds or not among its words, or of another type if it has neither;
    and an unknown option."""
    wrong: list[dict[str, Any]] = [{"none_such": 1}]
    for option in describe_options(struct):
        bounds = option["bounds"]
        values: list[object] = [bounds[bound] - 1 for bound in ("minimum", "exclusiveMinimum") if bound in bounds]
        values += [bounds[bound] + 1 for bound in ("maximum", "exclusiveMaximum") if bound in bounds]
        values += ["none such"] * ("enum" in bounds) + [[]] * ("minItems" in bounds)
        values += [""] * ("pattern" in bounds or bounds.get("minLength") == 1)
        values = values or [3 if "string" in option["type"] else "x"]
        wrong += [{option["name"]: value} for value in values]
    return wrong


WRONG += wrong_values(Settings)
WRONG += [{"policy": values} for values in wrong_values(ReusePolicy)]
WRONG += [{"hub": values} for values in wrong_values(EmbeddedHubConfig)]
WRONG += [{"hub": {"listen": [LISTENING | values]}} for values in wrong_values(Listen)]
WRONG += [choosing("store", values) for values in wrong_values(StoreChoice)]
WRONG += [
    choosing(kind, {"name": name} | values)
    for kind, name in (("device", "cpu"), ("matcher", "prefix"), ("selector", "hkvd"), ("transport", "zmq"))
    for values in wrong_values(PluginChoice)
]
WRONG += [
    choosing_with(kind, name, OPTIONS[kind, name] | values)
    for kind, name in OPTIONS
    for values in wrong_values(HOST.offered(kind, name).options)
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """vLLM's configuration of a model with a tokenizer, for a separator that is text."""
    folder = tmp_path_factory.mktemp("words")
    byte_pairs().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "opt", "architectures": ["OPTForCausalLM"]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        config = config_of(transfer_config({}))
    config.model_config = ModelConfig(str(folder), tokenizer=str(folder))
    return config


@pytest.fixture
def verdicts(vllm, tmp_path, capsys, monkeypatch):
    """What the command says is wrong, and why the start fails; empty where all is right."""
    # vLLM runs its worker in its scheduler's process, as it does on GPUs.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def checked(config: dict[str, Any]) -> str:
        code = main(["check", json.dumps(config), "--device", "cpu", "--only", "settings", "--only", "plugins"])
        lines = capsys.readouterr().out.splitlines()
        assert code in (0, 1), lines
        return next((line[20:] for line in lines if line.startswith("fail")), "")

    def started(config: dict[str, Any]) -> str:
        vllm.kv_transfer_config = KVTransferConfig(**config)
        try:
            scheduler = made_in_scheduler(vllm)
        except BlendHubError as error:
            return str(error)
        try:
            report(scheduler, WorkerReport(proofs={0: PROOF}))
            steps_until_served(scheduler)
            assert scheduler._scheduler
        except BlendHubError as error:
            return str(error)
        finally:
            scheduler.shutdown()
        return ""

    def both(settings: dict[str, Any]) -> tuple[str, str]:
        config = json.loads(json.dumps(transfer_config(settings)).replace("HERE", str(tmp_path)))
        return checked(config), started(config)

    return both


def test_every_setting_is_among_the_right_ones():
    assert {*SETTINGS, "endpoint"} == {*Settings.__struct_fields__}
    assert {*HUB, *OF_HUB} == {*EmbeddedHubConfig.__struct_fields__}
    assert {*OPTIONS} == {plugin for plugin in HOMES if plugin[0] != "command"}


@pytest.mark.parametrize("settings", RIGHT, ids=json.dumps)
def test_what_is_right_is_so_for_both(verdicts, settings):
    check, start = verdicts(settings)
    missing = "cannot be used: " in start and start.partition("cannot be used: ")[2].partition(";")[0]
    if missing:  # a device that is not here, or a library
        assert f"cannot run here: {missing}" in check
    else:
        assert check == start == ""


@pytest.mark.parametrize("settings", WRONG, ids=json.dumps)
def test_what_is_wrong_is_refused_by_both_with_the_same_words(verdicts, settings):
    check, start = verdicts(settings)
    assert check == start != ""
    assert "kv_connector_extra_config.blendhub" in check


def test_a_text_without_tokens_of_its_own_is_left_to_the_start_and_the_command_says_so(verdicts, capsys):
    settings = choosing_with("matcher", "separator", {"separator": "7"})
    check, start = verdicts(settings)
    assert check == "" and "matchers[0].options.separator = '7' has the tokens" in start
    main(["check", json.dumps(transfer_config(settings)), "--only", "settings"])
    assert "separator is text, which vLLM's start refuses if it has no tokens of its own" in capsys.readouterr().out
