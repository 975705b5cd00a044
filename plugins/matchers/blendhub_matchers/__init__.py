"""The matchers of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from typing import Any

from blendhub.contracts import Matcher
from blendhub.hookspecs import PluginSpec, Unavailable, hookimpl
from blendhub_matchers.options import PrefixOptions, RollingHashOptions, SeparatorOptions


def _prefix(options: Any) -> Matcher:
    from blendhub_matchers.prefix import PrefixMatcher

    return PrefixMatcher(options)


def _separator(options: Any) -> Matcher:
    from blendhub_matchers.separator import SeparatorMatcher

    return SeparatorMatcher(options)


def _rolling_hash(options: Any) -> Matcher:
    from blendhub_matchers.rolling_hash import RollingHashMatcher

    return RollingHashMatcher(options)


def _needs_numba() -> Unavailable | None:
    from importlib.util import find_spec

    if find_spec("numba"):
        return None
    return Unavailable("numba is not installed", "pip install 'numba>=0.61'")


@hookimpl
def blendhub_plugins() -> list[PluginSpec]:
    return [
        PluginSpec(
            kind="matcher",
            name="prefix",
            api=1,
            summary="exact reuse of a prompt's beginning, down to the token",
            factory=_prefix,
            options=PrefixOptions,
            capabilities=("prefix",),
        ),
        PluginSpec(
            kind="matcher",
            name="separator",
            api=1,
            summary="reuse of whole segments between separators, in any order",
            factory=_separator,
            options=SeparatorOptions,
            capabilities=("segments",),
        ),
        PluginSpec(
            kind="matcher",
            name="rolling_hash",
            api=1,
            summary="reuse at any offset, in any order, without separators",
            factory=_rolling_hash,
            options=RollingHashOptions,
            capabilities=("anywhere",),
            probe=_needs_numba,
        ),
    ]
