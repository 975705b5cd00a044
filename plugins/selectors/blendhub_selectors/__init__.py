"""The selectors of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.contracts import Selector
from blendhub.hookspecs import PluginSpec, hookimpl
from blendhub_selectors.options import FirstKOptions, HkvdOptions, RandomOptions


@hookimpl
def blendhub_selectors() -> list[PluginSpec[Selector]]:
    return [
        PluginSpec(
            name="hkvd",
            api=3,
            summary="blocks whose KV at an early layer deviates most from what the model computes now",
            factory="blendhub_selectors.ranking:HkvdSelector",
            options=HkvdOptions,
        ),
        PluginSpec(
            name="first_k",
            api=3,
            summary="the first tokens of every moved span",
            factory="blendhub_selectors.fixed:FirstKSelector",
            options=FirstKOptions,
            capabilities=("own_ratio",),
        ),
        PluginSpec(
            name="random",
            api=3,
            summary="blocks at random, to compare other selectors with",
            factory="blendhub_selectors.ranking:RandomSelector",
            options=RandomOptions,
        ),
        PluginSpec(
            name="all",
            api=3,
            summary="every moved token: as slow and as exact as no reuse",
            factory="blendhub_selectors.fixed:AllSelector",
            capabilities=("no_ratio",),
        ),
        PluginSpec(
            name="none",
            api=3,
            summary="no token: as fast as it gets",
            factory="blendhub_selectors.fixed:NoneSelector",
            capabilities=("no_ratio",),
        ),
    ]
