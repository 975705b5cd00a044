"""The adapter's settings: ``kv_connector_extra_config.blendhub`` in vLLM's configuration."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from blendhub.core.errors import OptionError, PluginError
from blendhub.core.layout import DEFAULT_MATCHERS, MIN_DONOR_CONTEXT
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import NOWHERE
from blendhub.framework.host import PluginHost
from blendhub.framework.options import did_you_mean, parse_options
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, HubPlacement

Mode = Literal["blend", "contiguous", "exact", "off"]
RepairMode = Literal["idle", "always", "off"]
Share = Annotated[float, Meta(ge=0, le=1)]
KEY = "blendhub"


class ReusePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits within which reuse pays."""

    min_reused_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="fewer reusable tokens, beyond vLLM's own cache, are not reused; default: no reuse that takes "
            "longer than prefill, by times measured on the loaded model"
        ),
    ] = None
    min_donor_context: Annotated[
        int,
        Meta(
            ge=0,
            description="KV that was computed with fewer tokens before it is not moved: elsewhere its text is computed "
            "once more, and moved from there; 0: all is moved",
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
        Meta(description="how this engine's processes reach the hub; default: zmq"),
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
        Share, Meta(description="share of the moved text that is recomputed; a request may override it")
    ] = 0.3
    donors: Annotated[
        Literal["all", "trusted"],
        Meta(
            description="whose KV may be moved into other prompts: that of all requests, or of those that say donate "
            "and of `blendhub warm`; other KV is reused behind its whole prefix only"
        ),
    ] = "all"
    policy: Annotated[ReusePolicy, Meta(description="limits within which reuse pays")] = ReusePolicy()
    audit_share: Annotated[
        Share,
        Meta(description="share of the blended requests that are audited, and at least one in ten minutes; 0: none"),
    ] = 0.001
    expected_agreement: Annotated[
        Share, Meta(description="vLLM's log warns if fewer of the audited requests agree on the first token")
    ] = 0.9
    repair: Annotated[
        RepairMode,
        Meta(
            description="compute blended KV anew while the answer is written, so that later tokens follow from exact "
            "KV; idle: while no prompt waits and at most four answers are written; always: beside other work, too"
        ),
    ] = "idle"
    repair_share: Annotated[
        float,
        Meta(
            gt=0, description="by how much steps that write answers may take longer for repairs, on average; 0.5: half"
        ),
    ] = 0.5
    repair_after_s: Annotated[
        float,
        Meta(ge=0, description="seconds after an answer's end in which its KV may still be repaired; its blocks stay"),
    ] = 2.0
    store: Annotated[bool, Meta(description="store what this engine computes")] = True
    store_blended: Annotated[
        bool | None,
        Meta(
            description="store blended KV, too, for prompts that repeat its whole prefix; default: if the arena holds "
            "four prompts of max_model_len"
        ),
    ] = None
    chunk_tokens: Annotated[int, Meta(ge=1, le=2**16, description="tokens of a chunk of stored KV")] = 256
    lookup_timeout_s: Annotated[float, Meta(gt=0, description="after this a request is computed without reuse")] = 1.0


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one request, in ``kv_transfer_params.blendhub``."""

    mode: Annotated[Mode | None, Meta(description="overrides the engine's for this request")] = None
    recompute_ratio: Annotated[Share | None, Meta(description="overrides the engine's for this request")] = None
    store: Annotated[bool, Meta(description="false: store nothing of this request")] = True
    donate: Annotated[
        bool, Meta(description="true: what this request stores may be moved into other prompts, if donors is trusted")
    ] = False
    explain: Annotated[bool, Meta(description="true: the response lists the loaded and the recomputed spans")] = False
    settled: Annotated[
        bool, Meta(description="false: take no KV that earlier requests blended; their text is blended anew")
    ] = True
    audit: Annotated[bool, Meta(description="true: audit this request if it blends")] = False
    repair: Annotated[RepairMode | None, Meta(description="overrides the engine's for this request")] = None
    approximate_from: Annotated[
        int,
        Meta(
            ge=0,
            description="of a prompt that another engine has computed: the position from which on its KV may be "
            "blended, as the report of that engine says",
        ),
    ] = 0


REPORTED = {"engine_tokens", "reason"}
"""Keys that only a report has: proxies hand the report of the engine that computed a prompt to the one that answers."""

EXTRA = "kv_connector_extra_config"
OWNER = f"{EXTRA}.{KEY}"


def read_settings(extra: Mapping[str, Any], host: PluginHost, device: str) -> Settings:
    """The checked settings; every plugin named in them can run here and takes its options. Errors name the key.

    ``device`` is vLLM's. Steps on an accelerator are short, and hold the interpreter's lock for much of their time, so
    an embedded hub runs in a process there. On CPUs that process would only compete with the engine for cores.
    """
    settings = check_settings(extra, host, device)
    for plugin in named_plugins(settings, device):
        host.spec(plugin.kind, plugin.name)
    placement: HubPlacement = settings.hub.embedded or ("thread" if device == "cpu" else "process")
    return msgspec.structs.replace(
        settings,
        device=settings.device or PluginChoice(name=device),
        hub=msgspec.structs.replace(settings.hub, embedded=placement),
    )


def choose_transport(settings: Settings, host: PluginHost, is_one_process: bool) -> PluginChoice:
    """How this engine's processes reach its hub. ``is_one_process``: vLLM's scheduler and its only worker share one.

    Raises OptionError for a transport that cannot leave a process where the hub or a worker is in another.
    """
    within = is_one_process and not settings.endpoint and settings.hub.embedded == "thread"
    choice = settings.transport or DEFAULT_TRANSPORT
    if not within and "one_process" in host.spec("transport", choice.name).capabilities:
        raise OptionError(
            f"{OWNER}.transport: {choice.name!r} works within one process, but the hub or a worker of this engine runs "
            f"in another one; name another transport, or leave it out for {DEFAULT_TRANSPORT.name!r}"
        )
    return choice


def check_settings(extra: Any, host: PluginHost, device: str | None) -> Settings:
    """The settings in ``kv_connector_extra_config``; raises OptionError or PluginError for the first mistake.

    Whether the plugins can run on this machine is not checked here. ``device`` is vLLM's, the default for the device
    plugin; None if it is not known.
    """
    if not isinstance(extra, Mapping):
        raise OptionError(f"{EXTRA} must be a mapping, got {extra!r}")
    for key in sorted(map(str, set(extra) - {KEY})):
        hint = f"; write it into {OWNER}" if key in Settings.__struct_fields__ else did_you_mean(key, [KEY])
        raise OptionError(f"{EXTRA} has the key {key!r}; BlendHub reads only {KEY!r} in it{hint}")
    settings = parse_options(OWNER, Settings, extra.get(KEY))
    if settings.endpoint and (of_hub := extra[KEY].get("hub")):
        keys = ", ".join(f"{OWNER}.hub.{key}" for key in of_hub)
        raise OptionError(
            f"{OWNER}.endpoint names a hub that runs by itself, so {keys} would change nothing: configure that hub "
            "(`blendhub serve --config`), or leave the endpoint out for a hub in this engine"
        )
    for plugin in named_plugins(settings, device):
        try:
            options = host.offered(plugin.kind, plugin.name).options
        except PluginError as error:
            raise PluginError(f"{plugin.key}: {error}") from None
        parse_options(f"{plugin.key}: {plugin.kind} {plugin.name!r}", options, plugin.options)
    return settings


class NamedPlugin(NamedTuple):
    """A plugin named in the settings or by a default."""

    key: str
    kind: str
    name: str
    options: Mapping[str, Any]


def named_plugins(settings: Settings, device: str | None) -> Iterator[NamedPlugin]:
    """Every plugin that an engine with these settings uses. ``device``: the device plugin where none is named."""
    chosen_device = settings.device or (PluginChoice(device) if device else None)
    transport = settings.transport or DEFAULT_TRANSPORT
    for kind, choice in (("transport", transport), ("device", chosen_device), ("selector", settings.selector)):
        if choice:
            yield NamedPlugin(f"{OWNER}.{kind}", kind, choice.name, choice.options)
    for number, choice in enumerate(settings.matchers):
        yield NamedPlugin(f"{OWNER}.matchers[{number}]", "matcher", choice.name, choice.options)
    if store := settings.hub.store:
        yield NamedPlugin(f"{OWNER}.hub.store", "store", store.name, store.options)
    for number, listen in enumerate(settings.hub.listen):
        yield NamedPlugin(f"{OWNER}.hub.listen[{number}]", "transport", listen.transport, listen.options)


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
