"""The adapter's settings: ``kv_connector_extra_config.blendhub`` in vLLM's configuration."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from blendhub.core.errors import OptionError
from blendhub.core.layout import DEFAULT_MATCHERS, MIN_DONOR_CONTEXT
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import NOWHERE
from blendhub.framework.host import PluginHost
from blendhub.framework.named_plugins import NamedPlugin, check_here, check_plugins
from blendhub.framework.options import did_you_mean, parse_options
from blendhub.hub.config import (
    DEFAULT_TRANSPORT,
    HubConfig,
    HubPlacement,
    check_endpoint,
    check_hub_config,
    plugins_of_hub,
)
from blendhub.vllm.lmcache_names import what_was_meant

Mode = Literal["blend", "contiguous", "exact", "off"]
RepairMode = Literal["idle", "always", "off"]
Share = Annotated[float, Meta(ge=0, le=1)]
KEY = "blendhub"


class ReusePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits within which reuse pays."""

    min_reused_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="fewer reusable tokens, beyond vLLM's own cache, are not reused; default: measured times decide"
        ),
    ] = None
    moves_states: Annotated[
        bool,
        Meta(
            description="whether text moves in models with recurrent layers, too: by maps of their states; measure "
            "what your model's answers lose with blendhub advise first"
        ),
    ] = False
    min_donor_context: Annotated[
        int,
        Meta(
            ge=0,
            description="KV that was computed with fewer tokens before it is not moved; 0: all is moved",
        ),
    ] = MIN_DONOR_CONTEXT


class EmbeddedHubConfig(HubConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of an embedded hub. It serves no metrics by default: each on a machine would need a port."""

    metrics: Annotated[str, Meta(description="HOST:PORT of the hub's own /metrics; port 0: any; empty: not served")] = (
        ""
    )
    embedded: Annotated[
        HubPlacement | None,
        Meta(description="in a thread of vLLM's process, or in a separate one; default: thread on CPUs, else process"),
    ] = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one engine reuses KV."""

    endpoint: Annotated[
        str, Meta(description="the hub's endpoint, as `blendhub serve` prints it; empty: a hub embedded in this engine")
    ] = ""
    transport: Annotated[
        PluginChoice | None,
        Meta(description="how this engine reaches the hub; default: zmq"),
    ] = None
    hub: Annotated[EmbeddedHubConfig, Meta(description="the embedded hub: the keys of hub.toml")] = EmbeddedHubConfig()
    matchers: Annotated[
        tuple[PluginChoice, ...], Meta(min_length=1, max_length=8, description="how reuse is found, by name")
    ] = DEFAULT_MATCHERS
    device: Annotated[
        PluginChoice | None, Meta(description="how KV is copied; default: the device named like vLLM's")
    ] = None
    selector: Annotated[PluginChoice, Meta(description="which reused tokens are recomputed")] = PluginChoice("attended")
    mode: Annotated[
        Mode,
        Meta(
            description="blend: reuse text anywhere; contiguous: only up to the first token that is not stored; "
            "exact: only what is bit for bit the same; off: nothing"
        ),
    ] = "blend"
    recompute_ratio: Annotated[
        Share | Literal["auto"],
        Meta(description="share of the moved text that is recomputed; auto: the hub finds it"),
    ] = 0.3
    donors: Annotated[
        Literal["all", "trusted"],
        Meta(
            description="whose KV may be moved: that of all requests, or of those that say donate and of `blendhub "
            "warm`"
        ),
    ] = "all"
    policy: Annotated[ReusePolicy, Meta(description="limits within which reuse pays")] = ReusePolicy()
    audit_share: Annotated[
        Share,
        Meta(description="share of blended requests that are audited, at least one in ten minutes; 0: none"),
    ] = 0.001
    expected_agreement: Annotated[
        Share, Meta(description="vLLM's log warns if fewer audits agree on the first token")
    ] = 0.9
    repair: Annotated[
        RepairMode,
        Meta(
            description="compute blended KV anew while the answer is written; idle: while no prompt waits and at most "
            "four answers are written; always: beside other work, too"
        ),
    ] = "idle"
    repair_share: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="how much longer steps that write answers may take for repairs, on average; default: 0.5 on "
            "CPUs, 0.25 on accelerators"
        ),
    ] = None
    repair_after_s: Annotated[
        float,
        Meta(ge=0, description="seconds after an answer's end in which its KV may still be repaired"),
    ] = 2.0
    doubt: Annotated[
        float,
        Meta(
            ge=0,
            description="a token of a greedy answer waits until all KV is exact if the likeliest one leads by less, in "
            "nats; 0: none waits",
        ),
    ] = 0.5
    doubt_pause_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="how long a step may be held for tokens in doubt; default: vLLM's time for a prompt of "
            "max_num_batched_tokens",
        ),
    ] = None
    store: Annotated[bool, Meta(description="store what this engine computes")] = True
    store_blended: Annotated[
        bool | None,
        Meta(
            description="store blended KV for prompts that repeat its whole prefix; default: if the arena holds four "
            "prompts of max_model_len"
        ),
    ] = None
    chunk_tokens: Annotated[int, Meta(ge=1, le=2**16, description="tokens of a chunk of stored KV")] = 256
    lookup_timeout_s: Annotated[float, Meta(gt=0, description="after this a request is computed without reuse")] = 1.0


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one request, in ``kv_transfer_params.blendhub``."""

    mode: Annotated[Mode | None, Meta(description="overrides the engine's")] = None
    recompute_ratio: Annotated[Share | None, Meta(description="overrides the engine's")] = None
    store: Annotated[bool, Meta(description="false: store nothing of this request")] = True
    donate: Annotated[bool, Meta(description="true: what this request stores may be moved, if donors is trusted")] = (
        False
    )
    explain: Annotated[bool, Meta(description="true: the response lists the loaded and the recomputed spans")] = False
    settled: Annotated[bool, Meta(description="false: take no KV that earlier requests blended")] = True
    audit: Annotated[bool, Meta(description="true: audit this request if it blends")] = False
    repair: Annotated[RepairMode | None, Meta(description="overrides the engine's")] = None
    doubt: Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="overrides the engine's")] = None
    approximate_from: Annotated[
        int,
        Meta(
            ge=0,
            description="from where on another engine's KV of this prompt may be blended, as its report says",
        ),
    ] = 0


REPORTED = {"engine_tokens", "reason"}
"""Keys that only a report has: proxies hand the report of the engine that computed a prompt to the one that answers."""

EXTRA = "kv_connector_extra_config"
OWNER = f"{EXTRA}.{KEY}"
OF_HUB = f"{OWNER}.hub."
"""What stands before the keys of the embedded hub."""


def read_settings(extra: Any, host: PluginHost, device: str | None, runs_here: bool = True) -> Settings:
    """The checked settings; raises OptionError or PluginError, with the key, for the first mistake.

    ``device`` is vLLM's, and None if it is not known; it is the default for the device plugin, and decides where an
    embedded hub runs. ``runs_here`` false: the plugins may need another machine than this one.
    """
    if not isinstance(extra, Mapping):
        raise OptionError(f"{EXTRA} must be a mapping, got {extra!r}")
    for key in sorted(map(str, set(extra) - {KEY})):
        hint = f"; write it into {OWNER}" if key in Settings.__struct_fields__ else what_was_meant(key, [KEY])
        raise OptionError(f"{EXTRA} has the key {key!r}; BlendHub reads only {KEY!r} in it{hint}")
    settings = parse_options(OWNER, Settings, extra.get(KEY), what_was_meant)
    if settings.endpoint and (of_hub := extra[KEY].get("hub")):
        keys = ", ".join(f"{OWNER}.hub.{key}" for key in of_hub)
        raise OptionError(
            f"{OWNER}.endpoint names a hub that runs by itself, so {keys} would change nothing: configure that hub "
            "(`blendhub serve --config`), or leave the endpoint out for a hub in this engine"
        )
    check_plugins(named_plugins(settings, device), host)
    check_hub_config(settings.hub, host, OF_HUB)
    if device:
        settings = msgspec.structs.replace(
            settings,
            device=settings.device or PluginChoice(device),
            hub=msgspec.structs.replace(settings.hub, embedded=settings.hub.embedded or _placement(device)),
        )
    transport = choose_transport(settings, host, is_one_process=_may_be_one_process(device))
    if settings.endpoint:
        check_endpoint(f"{OWNER}.endpoint", settings.endpoint, transport, host)
    if runs_here:
        check_here([*named_plugins(settings, device), *plugins_of_hub(settings.hub, OF_HUB)], host)
    return settings


def _placement(device: str) -> HubPlacement:
    """Where an embedded hub runs by default.

    Steps on an accelerator are short, and hold the interpreter's lock for much of their time, so it runs in a process
    there. On CPUs that process would only compete with the engine for cores.
    """
    return "thread" if device == "cpu" else "process"


def _may_be_one_process(device: str | None) -> bool:
    """Whether vLLM runs its only worker in its scheduler's process, if it has only one: for CPUs it has a rule."""
    return device != "cpu" or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "1"


def choose_transport(settings: Settings, host: PluginHost, is_one_process: bool) -> PluginChoice:
    """How this engine's processes reach its hub. ``is_one_process``: vLLM's scheduler and its only worker share one.

    Raises OptionError for a transport that cannot leave a process where the hub or a worker is in another.
    """
    choice = settings.transport or DEFAULT_TRANSPORT
    if settings.endpoint:
        elsewhere = f"the hub at {settings.endpoint} runs in another one"
    elif settings.hub.embedded == "process":
        elsewhere = f'{OWNER}.hub.embedded is "process", the default on all devices but CPUs, and not "thread"'
    elif not is_one_process:
        elsewhere = (
            "vLLM's workers run in others: several always do, and one does on CPUs unless "
            "VLLM_ENABLE_V1_MULTIPROCESSING is 0"
        )
    else:
        return choice
    if works_within_one_process(choice, host):
        raise OptionError(
            f"{OWNER}.transport: {choice.name!r} works within one process, but {elsewhere}; name another transport, "
            f"or leave it out for {DEFAULT_TRANSPORT.name!r}"
        )
    return choice


def works_within_one_process(transport: PluginChoice, host: PluginHost) -> bool:
    """Whether the transport cannot leave a process."""
    return "one_process" in host.offered("transport", transport.name).capabilities


def named_plugins(settings: Settings, device: str | None) -> Iterator[NamedPlugin]:
    """Every plugin that an engine with these settings uses, beside its hub's. ``device``: the plugin where none is
    named.
    """
    chosen_device = settings.device or (PluginChoice(device) if device else None)
    transport = settings.transport or DEFAULT_TRANSPORT
    for kind, choice in (("transport", transport), ("device", chosen_device), ("selector", settings.selector)):
        if choice:
            yield NamedPlugin(f"{OWNER}.{kind}", kind, choice.name, choice.options)
    for number, choice in enumerate(settings.matchers):
        yield NamedPlugin(f"{OWNER}.matchers[{number}]", "matcher", choice.name, choice.options)


def replace_texts(settings: Settings, host: PluginHost, ids_of: Callable[[str, str], list[int]]) -> Settings:
    """The settings, with token ids in place of what is written as text in the options of matchers. ``ids_of`` gets the
    key and the text.
    """
    matchers = []
    for number, choice in enumerate(settings.matchers):
        options: dict[str, Any] = dict(choice.options)
        for name in host.offered("matcher", choice.name).text_options:
            if isinstance(text := options.get(name), str):
                options[name] = ids_of(f"{OWNER}.matchers[{number}].options.{name}", text)
        matchers.append(PluginChoice(choice.name, options))
    return msgspec.structs.replace(settings, matchers=tuple(matchers))


def read_request(params: Mapping[str, Any] | None) -> RequestSettings:
    """The settings in a request's parameters; raises OptionError for a key or value that is not valid."""
    if params is not None and not isinstance(params, Mapping):
        raise OptionError(f"kv_transfer_params must be a mapping, got {params!r}")
    for key in foreign_keys(params):
        if key in RequestSettings.__struct_fields__:
            raise OptionError(f"kv_transfer_params has the key {key!r}; write it into kv_transfer_params.{KEY}")
        # Without regard to capitals, dashes and the like; other connectors' keys are not near.
        if did_you_mean(re.sub("[^a-z]", "", key.lower()), [KEY]):
            raise OptionError(
                f"kv_transfer_params has the key {key!r} (did you mean {KEY!r}?); BlendHub reads only that"
            )
    overrides = (params or {}).get(KEY)
    if isinstance(overrides, Mapping) and not REPORTED.isdisjoint(overrides):
        # A report without it says that all KV is what the model alone computes.
        overrides = {"approximate_from": overrides.get("approximate_from", NOWHERE)}
    return parse_options(f"kv_transfer_params.{KEY}", RequestSettings, overrides)


def has_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether another connector brings the KV of the prompt, which another engine has computed."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def is_split(params: Mapping[str, Any] | None) -> bool:
    """Whether one engine computes the prompt and another one answers, with another connector between them."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill") or params.get("do_remote_decode"))


def foreign_keys(params: Mapping[str, Any] | None) -> list[str]:
    """The keys that are not BlendHub's."""
    return [str(key) for key in params or {} if key != KEY]
