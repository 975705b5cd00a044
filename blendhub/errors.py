"""Everything BlendHub raises on purpose, so that callers can catch one base class.

Messages follow one pattern: what was given, what was expected, what to do next.
"""


class BlendHubError(Exception):
    """Base of every error that BlendHub raises itself."""


class InvalidInput(BlendHubError, ValueError):
    """An argument breaks a contract. Nothing was changed."""


class OptionError(BlendHubError, ValueError):
    """A plugin's option is unknown, has the wrong type, or is out of range."""


class PluginError(BlendHubError):
    """A plugin cannot be used: it is missing, broken, ambiguous, or cannot run here."""
