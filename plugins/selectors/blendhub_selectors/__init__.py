"""The selectors of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.contracts import Selector
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_selectors.options import AttendedOptions, FirstKOptions, HkvdOptions


@hookimpl
def blendhub_selectors() -> list[PluginSpec[Selector]]:
    return [
        PluginSpec(
            name="attended",
            api=1,
            summary="the tokens that the end of the prompt attends to most, and as many from the beginnings of spans",
            factory="blendhub_selectors.attended:AttendedSelector",
            options=AttendedOptions,
        ),
        PluginSpec(
            name="hkvd",
            api=1,
            summary="blocks whose KV at an early layer deviates most from what the model computes now",
            factory="blendhub_selectors.hkvd:HkvdSelector",
            options=HkvdOptions,
        ),
        PluginSpec(
            name="first_k",
            api=1,
            summary="the first tokens of every moved span",
            factory="blendhub_selectors.first_k:FirstKSelector",
            options=FirstKOptions,
            capabilities=("own_ratio",),
        ),
    ]
