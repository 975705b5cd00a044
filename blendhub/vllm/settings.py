"""What a person can set about the adapter: ``kv_connector_extra_config.blendhub`` in vLLM's configuration."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from blendhub.config import HubConfig
from blendhub.errors import OptionError
from blendhub.host import PluginHost
from blendhub.layout import DEFAULT_MATCHERS, MatcherChoice
from blendhub.options import parse_options

Mode = Literal["blend", "exact", "off"]
Share = Annotated[float, Meta(ge=0, le=1)]
KEY = "blendhub"


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plugin by name, and what it is told."""

    name: Annotated[str, Meta(description="a plugin by name")]
    options: Annotated[dict[str, Any], Meta(description="the plugin's options")] = {}


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When reuse pays."""

    min_reused_tokens: Annotated[
        int, Meta(ge=1, description="what would reuse fewer tokens, beyond vLLM's own cache, is left alone")
    ] = 64
    max_recompute_share: Annotated[
        Share, Meta(description="blending that would recompute more of the tokens it covers is left alone")
    ] = 0.8
    min_saved_tokens: Annotated[
        int, Meta(ge=1, description="shorter stretches between reused ones are not stored, unless all is exact")
    ] = 64


class OwnHub(HubConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hub within the engine: several of them on a machine must not all open a port, so none does by itself."""

    metrics: Annotated[str, Meta(description="HOST:PORT of the hub's own /metrics; port 0: any; empty: not served")] = (
        ""
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one engine reuses KV."""

    endpoint: Annotated[
        str, Meta(description="the hub's, as `blendhub serve` prints it; empty: a hub of this engine's own")
    ] = ""
    transport: Annotated[Choice, Meta(description="how to reach the endpoint")] = Choice(name="zmq")
    hub: Annotated[OwnHub, Meta(description="the hub of this engine's own: the keys of hub.toml")] = OwnHub()
    matchers: Annotated[
        tuple[MatcherChoice, ...], Meta(min_length=1, max_length=8, description="how reuse is found, by name")
    ] = DEFAULT_MATCHERS
    device: Annotated[Choice | None, Meta(description="how KV moves; none given: the one named like vLLM's device")] = (
        None
    )
    selector: Annotated[Choice, Meta(description="which reused tokens are recomputed")] = Choice(name="hkvd")
    mode: Annotated[
        Mode, Meta(description="blend: reuse text anywhere; exact: only what is bit for bit the same; off: nothing")
    ] = "blend"
    recompute_ratio: Annotated[
        Share, Meta(description="how much of the moved text is recomputed; a request may say otherwise")
    ] = 0.15
    policy: Annotated[Policy, Meta(description="when reuse pays")] = Policy()
    store: Annotated[bool, Meta(description="store what this engine computes")] = True
    chunk_tokens: Annotated[int, Meta(ge=1, le=2**16, description="tokens of a chunk of stored KV")] = 256
    blend_tokens_per_step: Annotated[
        int,
        Meta(ge=0, description="most tokens recomputed in an engine step; 0: what vLLM's scheduler left of its budget"),
    ] = 0
    min_blend_tokens_per_step: Annotated[
        int, Meta(ge=1, description="recomputed in each step even if vLLM's scheduler left nothing of its budget")
    ] = 256
    lookup_wait_ms: Annotated[
        float, Meta(ge=0, description="how long the scheduler waits for a lookup before it goes on to other requests")
    ] = 2.0
    lookup_timeout_s: Annotated[float, Meta(gt=0, description="after this a request is computed without reuse")] = 1.0


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may say, in ``kv_transfer_params.blendhub``."""

    mode: Annotated[Mode | None, Meta(description="for this request only")] = None
    recompute_ratio: Annotated[Share | None, Meta(description="for this request only")] = None
    store: Annotated[bool, Meta(description="false: store nothing of this request")] = True
    explain: Annotated[bool, Meta(description="true: the response also tells which tokens met which fate")] = False


OWNER = f"kv_connector_extra_config.{KEY}"


def read_settings(extra: Mapping[str, Any], host: PluginHost, device: str) -> Settings:
    """The checked settings; every plugin named in them is there and takes its options. Errors name the key."""
    strange = set(extra) - {KEY}
    if strange:
        raise OptionError(
            f"kv_connector_extra_config has the key {sorted(strange)[0]!r}; BlendHub reads only {KEY!r} in it"
        )
    settings = parse_options(OWNER, Settings, extra.get(KEY))
    if settings.device is None:
        settings = msgspec.structs.replace(settings, device=Choice(name=device))
    chosen = [
        ("transport", settings.transport),
        ("device", settings.device),
        ("selector", settings.selector),
        *(("matcher", matcher) for matcher in settings.matchers),
        *([("store", settings.hub.store)] if settings.hub.store else []),
        *(("transport", Choice(name=door.transport, options=door.options)) for door in settings.hub.listen),
    ]
    for kind, choice in chosen:
        assert choice
        parse_options(f"{kind} {choice.name!r}", host.spec(kind, choice.name).options, choice.options)
    return settings


def read_request(params: Mapping[str, Any] | None) -> RequestSettings:
    """What a request asks for; raises OptionError for what is not understood."""
    if params is not None and not isinstance(params, Mapping):
        raise OptionError(f"kv_transfer_params must be a mapping, got {params!r}")
    return parse_options(f"kv_transfer_params.{KEY}", RequestSettings, (params or {}).get(KEY))
