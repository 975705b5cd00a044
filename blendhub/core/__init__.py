"""The vocabulary: tokens, spans, layouts of KV, errors. Pure: no I/O, no state, nothing else of BlendHub.

A plugin may use the names below, and every error; what else the modules hold is BlendHub's own.
"""

from blendhub.core import errors
from blendhub.core.bounded import put_last
from blendhub.core.layout import (
    DEFAULT_MATCHERS,
    ITEM_SIZES,
    MIN_DONOR_CONTEXT,
    MIN_SAVED_TOKENS,
    KVLayout,
    Namespace,
)
from blendhub.core.run_table import RunTable
from blendhub.core.spans import NOWHERE, Match, Span, gaps, join
from blendhub.core.tokens import Tokens, as_tokens

__all__ = [
    "DEFAULT_MATCHERS",
    "ITEM_SIZES",
    "MIN_DONOR_CONTEXT",
    "MIN_SAVED_TOKENS",
    "NOWHERE",
    "KVLayout",
    "Match",
    "Namespace",
    "RunTable",
    "Span",
    "Tokens",
    "as_tokens",
    "errors",
    "gaps",
    "join",
    "put_last",
]
