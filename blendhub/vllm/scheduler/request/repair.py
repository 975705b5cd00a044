"""The repair of one request, and its audit."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from blendhub.core.spans import Span
from blendhub.outcome.report import AuditOutcome, DoubtOutcome, RepairOutcome


class Sent(NamedTuple):
    """What the workers know of a request whose tokens they look at."""

    end: int
    """The end of its known tokens."""
    n_blocks: Sequence[int]
    """The number of its blocks in each block table."""


class Progress:
    """How far a repair has come that is under way."""

    def __init__(self, first_approximate: int) -> None:
        self.exact_end = first_approximate
        """All tokens before this one are exact, or will be with what was planned."""
        self.has_begun = False
        self.is_planned = False
        """Whether everything was planned to be computed; the workers have yet to report that it was."""
        self.n_planned = 0
        """The tokens that were planned to be computed anew."""
        self.until = 0.0
        """If the request has ended: when the repair is given up."""
        self.sent: Sent | None = None
        """Set once workers look at its tokens."""
        self.since = 0
        """The first step in which they did."""
        self.last_watched = 0
        """The last step in which they did."""
        self.margin = math.inf
        """The least margin of a token that was not held."""

    def left(self, computed_end: int) -> Span:
        """What is left to compute; the last token once more, if it was not known to be the last."""
        return Span(min(self.exact_end, computed_end - 1), computed_end)


class RequestRepair:
    def __init__(self) -> None:
        self.progress: Progress | None = None
        """Set while the repair is under way."""
        self.outcome: RepairOutcome | None = None
        self.doubt: DoubtOutcome | None = None
        self.is_audited = False
        self.is_sample = False
        """Whether its audit stands for all requests: true if the engine chose the request, false if its client did."""
        self.audit: AuditOutcome | None = None
        """The outcome of the audit. No request is audited twice."""
