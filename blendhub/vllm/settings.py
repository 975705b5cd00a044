"""What a person can set about the adapter: ``kv_connector_extra_config.blendhub`` in vLLM's configuration."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from blendhub.config import HubConfig, Listen, StoreChoice
from blendhub.errors import BlendHubError, OptionError, PluginError
from blendhub.host import PluginHost
from blendhub.layout import DEFAULT_MATCHERS
from blendhub.options import mistakes_in, parse_options
from blendhub.plugin_choice import PluginChoice
from blendhub.suggest import did_you_mean

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
        tuple[PluginChoice, ...], Meta(min_length=1, max_length=8, description="how reuse is found, by name")
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


EXTRA = "kv_connector_extra_config"
OWNER = f"{EXTRA}.{KEY}"


def read_settings(extra: Mapping[str, Any], host: PluginHost, device: str) -> Settings:
    """The checked settings; every plugin named in them can run here and takes its options. Errors name the key."""
    mistakes = mistakes_in_settings(extra, host, device)
    if mistakes:
        kind = PluginError if all(isinstance(mistake, PluginError) for mistake in mistakes) else OptionError
        raise kind("; also: ".join(map(str, mistakes)))
    for choice in _choices(extra.get(KEY), device):
        host.spec(choice.kind, choice.name)
    settings = parse_options(OWNER, Settings, extra.get(KEY))
    return settings if settings.device else msgspec.structs.replace(settings, device=Choice(name=device))


def mistakes_in_settings(extra: Any, host: PluginHost, device: str | None) -> list[BlendHubError]:
    """Everything that is wrong in ``kv_connector_extra_config``; whether plugins can run here is another question.

    ``device`` is vLLM's, which is taken where none is named; None if that is not known.
    """
    if not isinstance(extra, Mapping):
        return [OptionError(f"{EXTRA} must be a mapping, got {extra!r}")]
    mistakes: list[BlendHubError] = []
    for key in sorted(map(str, set(extra) - {KEY})):
        hint = f"; write it into {OWNER}" if key in Settings.__struct_fields__ else did_you_mean(key, [KEY])
        mistakes.append(OptionError(f"{EXTRA} has the key {key!r}; BlendHub reads only {KEY!r} in it{hint}"))
    given = extra.get(KEY)
    mistakes += map(OptionError, mistakes_in(OWNER, Settings, given))
    for choice in _choices(given, device):
        try:
            options = host.offered(choice.kind, choice.name).options
        except PluginError as error:
            mistakes.append(PluginError(f"{choice.key}: {error}"))
        else:
            owner = f"{choice.key}: {choice.kind} {choice.name!r}"
            mistakes += map(OptionError, mistakes_in(owner, options, choice.options))
    return mistakes


class _Named(NamedTuple):
    """A plugin that is named in the settings, or by default."""

    key: str
    kind: str
    name: str
    options: Any


def _choices(given: Any, device: str | None) -> Iterator[_Named]:
    """Every plugin that the settings name, however wrong the rest of them may be."""
    settings = _with_defaults(given, Settings(device=Choice(name=device) if device else None))
    hub = _with_defaults(settings["hub"], OwnHub())
    named = [(f"{OWNER}.{key}", key, settings[key]) for key in ("transport", "device", "selector")]
    named += [(f"{OWNER}.matchers[{n}]", "matcher", one) for n, one in enumerate(_items(settings["matchers"]))]
    if isinstance(hub["store"], Mapping):
        named.append((f"{OWNER}.hub.store", "store", _with_defaults(hub["store"], StoreChoice())))
    for number, door in enumerate(_items(hub["listen"])):
        if isinstance(door, Mapping):
            choice = {"name": door.get("transport", _DOOR.transport), "options": door.get("options", {})}
            named.append((f"{OWNER}.hub.listen[{number}]", "transport", choice))
    for key, kind, choice in named:
        # What is not even a mapping with a name is wrong as a value.
        if isinstance(choice, Mapping) and isinstance(name := choice.get("name"), str):
            options = choice.get("options")
            yield _Named(key, kind, name, options if isinstance(options, Mapping) else {})


_DOOR = Listen(endpoint="anywhere")


def _with_defaults(given: Any, defaults: msgspec.Struct) -> dict[str, Any]:
    filled: dict[str, Any] = msgspec.to_builtins(defaults)
    if isinstance(given, Mapping):
        # None is allowed only where it means the default.
        filled |= {key: value for key, value in given.items() if key in filled and value is not None}
    return filled


def _items(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else []


def read_request(params: Mapping[str, Any] | None) -> RequestSettings:
    """What a request asks for; raises OptionError for what is not understood."""
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
    return parse_options(f"kv_transfer_params.{KEY}", RequestSettings, (params or {}).get(KEY))


def foreign_keys(params: Mapping[str, Any] | None) -> list[str]:
    """What a request says to other connectors, or to none."""
    return [str(key) for key in params or {} if key != KEY]
