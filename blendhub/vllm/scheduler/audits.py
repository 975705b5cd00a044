"""Audits in service: which blended requests are audited, and what the outcomes say."""

import logging
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b

from blendhub.outcome.agreement import wilson
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.scheduler.request.served_request import ServedRequest
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import AuditRecord

log = logging.getLogger(__name__)
MAX_PAUSE_S = 600.0
"""The time after an audit from which the next blended request is audited, whatever the share is."""

MAX_RECORDS = 4096
"""Audits that wait for vLLM to fetch its metrics; without metrics it fetches none."""

WATCHED = 512
"""The number of the last audits that a warning is about."""

SURE = 3.29
"""The normal quantile of a warning's interval, which misses the true share once in 1,000."""


class Audits:
    """The audits of one engine. Called by the scheduler's thread; waits for nothing."""

    def __init__(
        self,
        settings: Settings,
        are_possible: bool,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``are_possible``: whether the model predicts. ``namespace``: the digest of the engine's own."""
        self._settings = settings
        self.are_possible = are_possible
        self._namespace = namespace
        self._clock = clock
        self._last_at = clock()
        self._records: deque[AuditRecord] = deque(maxlen=MAX_RECORDS)
        self._recent: deque[bool] = deque(maxlen=WATCHED)
        """Which of the last audits agreed."""
        self._has_warned = False

    def begin(self, request: ServedRequest) -> None:
        """Decide whether this request, which is blended, is audited, and whether its audit stands for all requests."""
        repair = request.repair
        if not self.are_possible or repair.audit is not None or repair.is_audited:
            return
        share = self._settings.audit_share
        is_due = self._clock() >= self._last_at + MAX_PAUSE_S
        repair.is_sample = share > 0 and (is_due or chance_of(request.id) < share)
        repair.is_audited = repair.is_sample or request.terms.audit
        if repair.is_sample:
            self._last_at = self._clock()

    def end(self, request: ServedRequest, outcome: AuditOutcome) -> None:
        """Take note of an outcome. If the request asked for its audit, the outcome is only for its response.

        If too few agree with near certainty, a warning is logged, once; again only after as many as expected agreed.
        """
        request.repair.audit = outcome
        if not request.repair.is_sample:
            return
        expected = self._settings.expected_agreement
        self._records.append(AuditRecord(self._namespace, request.kv.ratio, outcome.agrees, outcome.kl, expected))
        self._recent.append(outcome.agrees)
        audits, agreed = len(self._recent), sum(self._recent)
        most = wilson(agreed, audits, SURE).high
        if agreed >= expected * audits:
            self._has_warned = False
        elif most < expected and not self._has_warned:
            self._has_warned = True
            log.warning(
                "BlendHub: of the last %d audited requests %.1f%% had the same first token as without reuse, and of "
                "all requests probably at most %.1f%%: less than expected_agreement %g. Raise recompute_ratio, choose "
                "another selector, or expect less",
                audits, 100 * agreed / audits, 100 * most, expected,
            )  # fmt: skip

    def take_records(self) -> list[AuditRecord]:
        """The audits since the last call, for the metrics."""
        records = list(self._records)
        self._records.clear()
        return records


def chance_of(request: str) -> float:
    """A number from 0 to 1 that is random, but always the same for one request."""
    return int.from_bytes(blake2b(request.encode(), digest_size=8).digest()) / 2**64
