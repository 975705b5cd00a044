"""What a person writes about the adapter: every mistake is named at start-up, with what would be right."""

import importlib
import inspect

import pytest

from blendhub import PluginHost
from blendhub.core.errors import BlendHubError, OptionError, PluginError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.settings import (
    EmbeddedHubConfig,
    RequestSettings,
    Settings,
    choose_transport,
    read_request,
    read_settings,
)

HOST = PluginHost.discover()
WHERE = "kv_connector_extra_config.blendhub"


def read(given, host=HOST):
    return read_settings({"blendhub": given}, host, "cpu")


def test_what_is_not_written_has_its_default_and_the_device_is_that_which_vllm_runs_on():
    for extra in ({}, {"blendhub": {}}, {"blendhub": None}):
        settings = read_settings(extra, HOST, "cpu")
        assert settings == Settings(device=PluginChoice(name="cpu"), hub=EmbeddedHubConfig(embedded="thread"))
    assert settings.hub.metrics == "" == read({"hub": {"arena_gib": 1}}).hub.metrics
    settings = read({"mode": "exact", "recompute_ratio": 0.5, "policy": {"min_reused_tokens": 10}, "store": False})
    assert (settings.mode, settings.recompute_ratio, settings.store) == ("exact", 0.5, False)
    assert settings.policy.min_reused_tokens == 10


@pytest.mark.parametrize("field", Settings.__struct_fields__)
def test_every_key_of_the_wrong_type_is_named(field):
    with pytest.raises(OptionError) as raised:
        read({field: ["no setting", "is a list of texts"]})
    assert str(raised.value).startswith(f"{WHERE}: Expected") and f"- at `$.{field}" in str(raised.value)


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"recompute_ratio": 1.5}, "Expected `float` <= 1.0 - at `$.recompute_ratio`"),
        ({"recompute_ratio": float("nan")}, "at `$.recompute_ratio`"),
        ({"matchers": []}, "Expected `array` of length >= 1 - at `$.matchers`"),
        ({"chunk_tokens": 0}, "at `$.chunk_tokens`"),
        ({"lookup_timeout_s": 0}, "at `$.lookup_timeout_s`"),
        ({"hub": {"embedded": "nowhere"}}, "Invalid enum value 'nowhere' - at `$.hub.embedded`"),
        ([], "Expected a mapping of names to values, got []"),
    ],
)
def test_a_value_that_does_not_fit_is_named(given, complaint):
    with pytest.raises(OptionError) as raised:
        read(given)
    assert complaint in str(raised.value) and WHERE in str(raised.value)


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"transport": {"name": "tcp"}}, "no transport 'tcp'; installed: inproc, zmq"),
        ({"matchers": [{"name": "prefix"}, {"name": "prefixes"}]}, "no matcher 'prefixes' (did you mean 'prefix'?)"),
        ({"hub": {"store": {"name": "disc"}}}, "no store 'disc' (did you mean 'disk'?); installed: disk"),
        (
            {"selector": {"name": "first_k", "options": {"n": 1}}},
            "'first_k': Object contains unknown field `n`",
        ),
        ({"transport": {"name": "zmq", "options": {"max_pending": -1}}}, "Expected `int` >= 1 - at `$.max_pending`"),
        ({"device": {"name": "cpu", "options": {"speed": 9}}}, "device 'cpu': Object contains unknown field `speed`"),
        ({"policy": {"min_reused": 3}}, "unknown field `min_reused` - at `$.policy` (did you mean"),
        ({"selector": {"nam": "hkvd"}}, "unknown field `nam` - at `$.selector` (did you mean 'name'?)"),
        ({"hub": {"store": {"path": "/x"}}}, "unknown field `path` - at `$.hub.store`"),
    ],
)
def test_a_mistake_in_any_part_is_named_before_anything_starts(given, complaint):
    """Other mistakes, and the same words for them, are in the tests of ``blendhub check``."""
    with pytest.raises(BlendHubError) as raised:
        read(given)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    "given, package",
    [
        ({}, "transports"),
        ({"transport": {"name": "fake"}}, "cpu"),
        ({"transport": {"name": "fake"}, "device": {"name": "fake"}}, "selectors"),
    ],
)
def test_a_plugin_that_is_not_installed_is_named_with_what_installs_it(given, package, site):
    site.install(
        "stranger",
        """
        from blendhub import PluginSpec, hookimpl

        @hookimpl
        def blendhub_transports():
            return [PluginSpec(api=5, name="fake", summary="a fake", factory=print)]

        @hookimpl
        def blendhub_devices():
            return blendhub_transports()
        """,
    )
    with pytest.raises(PluginError, match=rf"it comes with: pip install .blendhub\[{package}\]"):
        read(given, site.host())


def test_keys_of_the_embedded_hub_beside_an_endpoint_are_refused_with_both_keys_named():
    with pytest.raises(OptionError) as raised:
        read({"endpoint": "ipc:///x", "hub": {"arena_gib": 8, "store": {"name": "disk"}}})
    said = str(raised.value)
    assert all(f"{WHERE}.{key}" in said for key in ("endpoint", "hub.arena_gib", "hub.store")), said
    assert read({"endpoint": "ipc:///x", "hub": {}}).endpoint == "ipc:///x"


def test_keys_beside_blendhub_are_refused():
    with pytest.raises(OptionError, match="has the key 'selector'; BlendHub reads only 'blendhub' in it"):
        read_settings({"selector": {"name": "hkvd"}}, HOST, "cpu")


# What a request says.

OTHERS = dict.fromkeys(
    [
        "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port",
        "remote_request_id", "remote_bootstrap_addr", "remote_notify_port", "remote_dp_rank", "tp_size", "transfer_id",
        "ret_first_tok", "lmcache.tag.user", "lmcache.skip_save", 7,
    ]
)  # fmt: skip
"""What vLLM's other connectors read."""


@pytest.mark.parametrize(
    "params", [None, {}, {"blendhub": {}}, {"blendhub": None}, {"do_remote_prefill": False}, OTHERS]
)
def test_a_request_that_says_nothing_gets_the_defaults(params):
    assert read_request(params) == RequestSettings()
    asked = {"blendhub": {"mode": "exact", "recompute_ratio": 1, "store": False}}
    assert read_request((params or {}) | asked) == RequestSettings(mode="exact", recompute_ratio=1.0, store=False)


@pytest.mark.parametrize(
    "params, complaint",
    [
        ({"blendhub": {"recompute_rato": 0.5}}, "unknown field `recompute_rato` (did you mean 'recompute_ratio'?)"),
        ({"blendhub": {"mode": "fast"}}, "Invalid enum value 'fast' - at `$.mode`"),
        ({"blendhub": {"recompute_ratio": -0.1}}, "Expected `float` >= 0.0 - at `$.recompute_ratio`"),
        ({"blendhub": {"recompute_ratio": "0.1"}}, "at `$.recompute_ratio`"),
        ({"blendhub": {"recompute_ratio": float("nan")}}, "at `$.recompute_ratio`"),
        ({"blendhub": {"store": 1}}, "Expected `bool`, got `int` - at `$.store`"),
        ({"blendhub": {7: 1}}, "Expected `str`"),
        ({"blendhub": "blend"}, "Expected a mapping"),
        ({"blendhub": ["blend"]}, "Expected a mapping"),
        ({"blendhb": {"mode": "off"}}, "has the key 'blendhb' (did you mean 'blendhub'?)"),
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


@pytest.mark.parametrize(
    "given, device, where",
    [
        ({}, "cpu", "thread"),
        ({}, "cuda", "process"),
        ({}, "npu", "process"),
        ({"embedded": "process"}, "cpu", "process"),
        ({"embedded": "thread"}, "cuda", "thread"),
    ],
)
def test_an_embedded_hub_shares_the_process_only_of_an_engine_that_computes_there(given, device, where):
    extra = {"blendhub": {"hub": given, "device": {"name": "cpu"}}}
    assert read_settings(extra, HOST, device).hub.embedded == where


@pytest.mark.parametrize(
    "given, is_one_process, chosen",
    [
        ({}, True, "zmq"),
        ({"hub": {"embedded": "process"}}, True, "zmq"),
        ({"endpoint": "ipc:///x"}, True, "zmq"),
        ({"transport": {"name": "zmq", "options": {"max_pending": 9}}}, True, "zmq"),
        ({"transport": {"name": "inproc"}}, True, "inproc"),
        ({"transport": {"name": "inproc"}}, False, None),
        ({"transport": {"name": "inproc"}, "hub": {"embedded": "process"}}, True, None),
        ({"transport": {"name": "inproc"}, "endpoint": "inproc://x"}, True, None),
    ],
)
def test_the_transport_that_was_chosen_is_used_or_refused(given, is_one_process, chosen):
    settings = read(given)
    if chosen is None:
        with pytest.raises(OptionError, match="transport: 'inproc' works within one process, but the hub or a worker"):
            choose_transport(settings, HOST, is_one_process)
        return
    choice = choose_transport(settings, HOST, is_one_process)
    assert choice.name == chosen and choice.options == given.get("transport", {}).get("options", {})
