"""The selectors of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.hookspecs import PluginSpec, hookimpl
from blendhub_selectors.options import FirstKOptions, HkvdOptions, RandomOptions


@hookimpl
def blendhub_plugins() -> list[PluginSpec]:
    return [
        PluginSpec(
            kind="selector",
            name="hkvd",
            api=1,
            summary="blocks whose KV at an early layer deviates most from what the model computes now",
            factory="blendhub_selectors.ranking:HkvdSelector",
            options=HkvdOptions,
        ),
        PluginSpec(
            kind="selector",
            name="first_k",
            api=1,
            summary="the first tokens of every moved span",
            factory="blendhub_selectors.fixed:FirstKSelector",
            options=FirstKOptions,
            capabilities=("own_ratio",),
        ),
        PluginSpec(
            kind="selector",
            name="random",
            api=1,
            summary="blocks at random, to compare other selectors with",
            factory="blendhub_selectors.ranking:RandomSelector",
            options=RandomOptions,
        ),
        PluginSpec(
            kind="selector",
            name="all",
            api=1,
            summary="every moved token: as slow and as exact as no reuse",
            factory="blendhub_selectors.fixed:AllSelector",
            capabilities=("no_ratio",),
        ),
        PluginSpec(
            kind="selector",
            name="none",
            api=1,
            summary="no token: as fast as it gets",
            factory="blendhub_selectors.fixed:NoneSelector",
            capabilities=("no_ratio",),
        ),
    ]
