"""The matchers of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.contracts import Matcher
from blendhub.framework.hookspecs import PluginSpec, Unavailable, hookimpl
from blendhub_matchers.options import RollingHashOptions, SeparatorOptions


def _needs_numba() -> Unavailable | None:
    from importlib.util import find_spec

    if find_spec("numba"):
        return None
    return Unavailable("numba is not installed", "pip install 'numba>=0.61'")


@hookimpl
def blendhub_matchers() -> list[PluginSpec[Matcher]]:
    return [
        PluginSpec(
            name="prefix",
            api=1,
            summary="exact reuse of a prompt's beginning, down to the token",
            factory="blendhub_matchers.prefix:PrefixMatcher",
        ),
        PluginSpec(
            name="separator",
            api=1,
            summary="reuse of whole segments between separators, in any order",
            factory="blendhub_matchers.separator:SeparatorMatcher",
            options=SeparatorOptions,
            text_options=("separator",),
        ),
        PluginSpec(
            name="rolling_hash",
            api=1,
            summary="reuse at any offset, in any order, without separators",
            factory="blendhub_matchers.rolling_hash:RollingHashMatcher",
            options=RollingHashOptions,
            probe=_needs_numba,
        ),
    ]
