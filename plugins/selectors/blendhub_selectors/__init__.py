"""The selectors of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.contracts import Selector
from blendhub.hookspecs import PluginSpec, hookimpl
from blendhub_selectors.options import (
    CombinedOptions,
    FirstKOptions,
    HkvdOptions,
    LearnedOptions,
    QuestionOptions,
    RandomOptions,
)


@hookimpl
def blendhub_selectors() -> list[PluginSpec[Selector]]:
    return [
        PluginSpec(
            name="combined",
            api=3,
            summary="beginnings of spans, what the question speaks of, and what changed most before",
            factory="blendhub_selectors.windowed:CombinedSelector",
            options=CombinedOptions,
            capabilities=("sensitivity",),
        ),
        PluginSpec(
            name="learned",
            api=3,
            summary="beginnings of spans, and tokens whose KV changed most when it was computed in another context",
            factory="blendhub_selectors.windowed:LearnedSelector",
            options=LearnedOptions,
            capabilities=("sensitivity",),
        ),
        PluginSpec(
            name="question",
            api=3,
            summary="where the question's rare words stand in moved text, then beginnings of spans",
            factory="blendhub_selectors.windowed:QuestionSelector",
            options=QuestionOptions,
        ),
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
