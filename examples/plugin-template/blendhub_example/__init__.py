"""What this distribution offers. BlendHub imports this module to list it, so what is heavy to import is named, not imported."""

from importlib.util import find_spec

from blendhub import PluginSpec, Unavailable, hookimpl
from blendhub_example.edges import EdgesOptions, EdgesSelector
from blendhub_example.ngram import NgramMatcher, NgramOptions


def _needs_torch() -> Unavailable | None:
    return None if find_spec("torch") else Unavailable("torch is not installed", "pip install torch")


@hookimpl
def blendhub_plugins() -> list[PluginSpec]:
    return [
        PluginSpec(
            kind="matcher",
            name="ngram",
            api=1,
            summary="reuse at any offset, with a dictionary and no compiled code",
            factory=NgramMatcher,
            options=NgramOptions,
            capabilities=("anywhere",),
        ),
        PluginSpec(
            kind="selector",
            name="edges",
            api=1,
            summary="the first and the last tokens of every moved span",
            factory=EdgesSelector,
            options=EdgesOptions,
            capabilities=("own_ratio",),
        ),
        PluginSpec(
            kind="device",
            name="plain",
            api=1,
            summary="copies and turns KV with nothing but torch, while the engine waits",
            factory="blendhub_example.plain:PlainDevice",
            probe=_needs_torch,
        ),
    ]
