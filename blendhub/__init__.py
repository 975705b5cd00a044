"""BlendHub: reuse KV cache for text a server has seen before, wherever it stands in the prompt."""

from blendhub.core import errors
from blendhub.core.spans import Match, Span, combine
from blendhub.framework.discovery import Plugin
from blendhub.framework.hookspecs import API_VERSION, PluginSpec, Unavailable, hookimpl
from blendhub.framework.host import PluginHost

__all__ = [
    "API_VERSION",
    "Match",
    "Plugin",
    "PluginHost",
    "PluginSpec",
    "Span",
    "Unavailable",
    "combine",
    "errors",
    "hookimpl",
]

__version__ = "0.1.0"
