"""What each kind of plugin must do; the docstrings are the specification."""

from blendhub.contracts.matcher import Matcher

__all__ = ["Matcher"]
