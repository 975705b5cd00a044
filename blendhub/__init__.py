"""BlendHub: reuse KV cache for text a server has seen before, wherever it stands in the prompt."""

from blendhub.discovery import Plugin
from blendhub.hookspecs import API_VERSION, PluginSpec, Unavailable, hookimpl
from blendhub.host import PluginHost
from blendhub.plan import Match, Span, combine

__all__ = [
    "API_VERSION",
    "Match",
    "Plugin",
    "PluginHost",
    "PluginSpec",
    "Span",
    "Unavailable",
    "combine",
    "hookimpl",
]

__version__ = "0.1.0"
