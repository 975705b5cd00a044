"""What this distribution offers. BlendHub imports this module to list it, so it imports nothing heavy."""

from importlib.util import find_spec

from blendhub import PluginSpec, Unavailable, hookimpl
from blendhub.contracts import Device, Matcher, Selector
from blendhub_example.edges import EdgesOptions, EdgesSelector
from blendhub_example.ngram import NgramMatcher, NgramOptions


def _needs_torch() -> Unavailable | None:
    return None if find_spec("torch") else Unavailable("torch is not installed", "pip install torch")


@hookimpl
def blendhub_matchers() -> list[PluginSpec[Matcher]]:
    return [
        PluginSpec(
            name="ngram",
            api=2,
            summary="reuse at any offset, with a dictionary and no compiled code",
            factory=NgramMatcher,
            options=NgramOptions,
            capabilities=("anywhere",),
        ),
    ]


@hookimpl
def blendhub_selectors() -> list[PluginSpec[Selector]]:
    return [
        PluginSpec(
            name="edges",
            api=2,
            summary="the first and the last tokens of every moved span",
            factory=EdgesSelector,
            options=EdgesOptions,
            capabilities=("own_ratio",),
        ),
    ]


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="plain",
            api=2,
            summary="copies and turns KV with nothing but torch, while the engine waits",
            factory="blendhub_example.plain:PlainDevice",
            probe=_needs_torch,
        ),
    ]
