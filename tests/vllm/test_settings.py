"""What a person writes about the adapter: every mistake is named at start-up, with what would be right."""

import importlib
import inspect
import re
from contextlib import nullcontext

import pytest

from blendhub import PluginHost
from blendhub.core.errors import OptionError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.lmcache_names import LMCACHE_NAMES
from blendhub.vllm.settings import (
    EmbeddedHubConfig,
    RequestSettings,
    ReusePolicy,
    Settings,
    choose_transport,
    read_request,
    read_settings,
)

HOST = PluginHost.discover()


def read(given):
    return read_settings({"blendhub": given}, HOST, "cpu")


def test_what_is_not_written_has_its_default_and_the_device_is_that_which_vllm_runs_on():
    for extra in ({}, {"blendhub": {}}, {"blendhub": None}):
        settings = read_settings(extra, HOST, "cpu")
        assert settings == Settings(device=PluginChoice(name="cpu"), hub=EmbeddedHubConfig(embedded="thread"))
    assert settings.hub.metrics == "" == read({"hub": {"arena_gib": 1}}).hub.metrics
    settings = read({"mode": "exact", "recompute_ratio": 0.5, "policy": {"min_reused_tokens": 10}, "store": False})
    assert (settings.mode, settings.recompute_ratio, settings.store) == ("exact", 0.5, False)
    assert settings.policy.min_reused_tokens == 10


# What a request says.

OTHERS = dict.fromkeys(["do_remote_decode", "remote_engine_id", "remote_block_ids", "tp_size", "lmcache.tag.user", 7])
"""What vLLM's other connectors read."""


@pytest.mark.parametrize("params", [None, {}, {"blendhub": {}}, {"blendhub": None}, OTHERS])
def test_a_request_that_says_nothing_gets_the_defaults(params):
    assert read_request(params) == RequestSettings()
    asked = {"blendhub": {"mode": "exact", "recompute_ratio": 1, "store": False}}
    assert read_request((params or {}) | asked) == RequestSettings(mode="exact", recompute_ratio=1.0, store=False)


@pytest.mark.parametrize(
    "params, complaint",
    [
        ({"blendhub": {"recompute_rato": 0.5}}, "unknown field `recompute_rato` (did you mean 'recompute_ratio'?)"),
        ({"blendhub": {"mode": "fast"}}, "Invalid enum value 'fast' - at `$.mode`"),
        ({"blendhub": {"recompute_ratio": float("nan")}}, "at `$.recompute_ratio`"),
        ({"blendhub": {7: 1}}, "Expected `str`"),
        ({"blendhub": ["blend"]}, "Expected a mapping"),
        ({"blend_hub": {}, "blendhub": {}}, "has the key 'blend_hub' (did you mean 'blendhub'?)"),
        ({"BlendHub": {}}, "has the key 'BlendHub' (did you mean 'blendhub'?)"),
        ({"mode": "off"}, "has the key 'mode'; write it into kv_transfer_params.blendhub"),
    ],
)
def test_what_a_request_gets_wrong_is_named(params, complaint):
    with pytest.raises(OptionError) as raised:
        read_request(params)
    assert complaint in str(raised.value) and "kv_transfer_params" in str(raised.value)


def test_where_vllm_makes_cuda_graphs_a_wrong_setting_ends_its_start_before_the_model_is_loaded():
    connector = pytest.importorskip("blendhub.vllm.connector", reason="needs vLLM; `make setup` installs it")
    ask = connector.BlendHubConnector.requires_piecewise_for_cudagraph
    assert ask({"blendhub": {"recompute_ratio": 0.3}}) is False
    with pytest.raises(OptionError, match="recompute_ration"):
        ask({"blendhub": {"recompute_ration": 0.3}})
    assert "requires_piecewise_for_cudagraph(" in inspect.getsource(importlib.import_module("vllm.config.vllm"))


INPROC = {"name": "inproc"}
IN_A_THREAD, IN_A_PROCESS = ({"transport": INPROC, "hub": {"embedded": where}} for where in ("thread", "process"))


@pytest.mark.parametrize(
    "given, device, is_one_process, chosen, why",
    [
        ({}, "cpu", True, "zmq", ""),
        ({"transport": {"name": "zmq", "options": {"max_pending": 9}}}, "cpu", True, "zmq", ""),
        ({"transport": INPROC}, "cpu", True, "inproc", ""),
        (IN_A_THREAD, "cuda", True, "inproc", ""),
        (IN_A_THREAD, "cuda", False, "", "vLLM's workers run in others"),
        ({"transport": INPROC}, "cuda", True, "", '.hub.embedded is "process", the default on all devices but CPUs'),
        (IN_A_PROCESS, "cpu", True, "", '.hub.embedded is "process"'),
        ({"transport": INPROC, "endpoint": "inproc://x"}, "cpu", True, "", "the hub at inproc://x runs in another one"),
    ],
)
def test_the_transport_that_was_chosen_is_used_or_refused(monkeypatch, given, device, is_one_process, chosen, why):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def choose():
        settings = read_settings({"blendhub": given}, HOST, device, runs_here=False)
        return choose_transport(settings, HOST, is_one_process)

    if why:
        with pytest.raises(OptionError, match=r"blendhub\.transport: 'inproc' works within one process") as raised:
            choose()
        assert why in str(raised.value)
        return
    choice = choose()
    assert choice.name == chosen and choice.options == given.get("transport", {}).get("options", {})


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_on_cpus_vllm_gives_its_only_worker_a_process_unless_told_otherwise(model, monkeypatch, multiprocessing):
    """Where it does, a transport within one process is refused without vLLM, too."""
    connector = pytest.importorskip("blendhub.vllm.connector", reason="needs vLLM; `make setup` installs it")
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", multiprocessing)
    config = EngineArgs(str(model), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    is_one_process = connector._is_one_process(config)
    assert is_one_process is (multiprocessing == "0")
    with nullcontext() if is_one_process else pytest.raises(OptionError, match="vLLM's workers run in others"):
        read({"transport": INPROC})


@pytest.mark.parametrize(
    "given, hint",
    [
        ({"chunk_size": 512}, "unknown field `chunk_size` (a setting of LMCache; chunk_tokens here); valid keys: "),
        ({"LMCACHE_MAX_LOCAL_CPU_SIZE": 5}, "(a setting of LMCache; hub.arena_gib here)"),
        (
            {"hub": {"local_disk": "/kv"}},
            "unknown field `local_disk` - at `$.hub` (a setting of LMCache; hub.store here: ",
        ),
        (
            {"enable_blending": True},
            "(a setting of LMCache; not needed here: text is blended unless mode says otherwise)",
        ),
        ({"LMCACHE_NUMA_MODE": "auto"}, "(a setting of LMCache; there is none like it here)"),
    ],
)
def test_what_is_called_otherwise_in_lmcache_is_named_as_it_is_here(given, hint):
    with pytest.raises(OptionError) as raised:
        read(given)
    assert hint in str(raised.value)
    # LMCache's own place for it is vLLM's extra configuration itself.
    with pytest.raises(OptionError, match=r"a setting of LMCache; chunk_tokens here"):
        read_settings({"lmcache.chunk_size": 512}, HOST, "cpu")


def test_what_takes_the_place_of_lmcache_s_settings_is_there():
    """Each setting that a hint names is one: the parts of its path are keys."""
    keys = {"options", "path", "layer", "kv_role"}
    for struct in (Settings, ReusePolicy, EmbeddedHubConfig):
        keys |= {*struct.__struct_fields__}
    for name, meaning in LMCACHE_NAMES.items():
        named = re.findall(r"[a-z]+(?:_[a-z]+)+|hub\.store|hub\.arena_gib|policy\.\w+", meaning)
        assert {part for path in named for part in path.split(".")} <= keys | {"shared_directory", "capacity_gib"}, name
