"""The selectors of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from typing import Any

from blendhub.contracts import Selector
from blendhub.hookspecs import PluginSpec, hookimpl
from blendhub_selectors.options import FirstKOptions, HkvdOptions, RandomOptions


def _hkvd(options: Any) -> Selector:
    from blendhub_selectors.ranking import HkvdSelector

    return HkvdSelector(options)


def _random(options: Any) -> Selector:
    from blendhub_selectors.ranking import RandomSelector

    return RandomSelector(options)


def _first_k(options: Any) -> Selector:
    from blendhub_selectors.fixed import FirstKSelector

    return FirstKSelector(options)


def _all(_: Any) -> Selector:
    from blendhub_selectors.fixed import AllSelector

    return AllSelector()


def _none(_: Any) -> Selector:
    from blendhub_selectors.fixed import NoneSelector

    return NoneSelector()


@hookimpl
def blendhub_plugins() -> list[PluginSpec]:
    return [
        PluginSpec(
            kind="selector",
            name="hkvd",
            api=1,
            summary="blocks whose KV at an early layer deviates most from what the model computes now",
            factory=_hkvd,
            options=HkvdOptions,
        ),
        PluginSpec(
            kind="selector",
            name="first_k",
            api=1,
            summary="the first tokens of every moved span",
            factory=_first_k,
            options=FirstKOptions,
            capabilities=("own_ratio",),
        ),
        PluginSpec(
            kind="selector",
            name="random",
            api=1,
            summary="blocks at random, to compare other selectors with",
            factory=_random,
            options=RandomOptions,
        ),
        PluginSpec(
            kind="selector",
            name="all",
            api=1,
            summary="every moved token: as slow and as exact as no reuse",
            factory=_all,
            capabilities=("no_ratio",),
        ),
        PluginSpec(
            kind="selector",
            name="none",
            api=1,
            summary="no token: as fast as it gets",
            factory=_none,
            capabilities=("no_ratio",),
        ),
    ]
