"""The outcomes of audits that engines have reported, by namespace."""

from collections import deque

from blendhub.hub.limits import MOST_AUDITED_NAMESPACES

RECENT = 512
"""The number of a namespace's last audits from which its present agreement is computed."""


class _Audits:
    def __init__(self) -> None:
        self.audits = 0
        self.disagreements = 0
        self.recent: deque[bool] = deque(maxlen=RECENT)


class AuditTable:
    """Counts by the digest of an engine's namespace."""

    def __init__(self) -> None:
        self.namespaces: dict[str, _Audits] = {}
        """The audits by namespace; the namespace that was silent longest comes first."""

    def add(self, namespace: str, agreed: int, disagreed: int) -> None:
        counts = self.namespaces.pop(namespace, None) or _Audits()
        self.namespaces[namespace] = counts
        if len(self.namespaces) > MOST_AUDITED_NAMESPACES:
            del self.namespaces[next(iter(self.namespaces))]
        counts.audits += agreed + disagreed
        counts.disagreements += disagreed
        counts.recent.extend(disagreed * [False] + agreed * [True])

    def of(self, namespace: str) -> dict[str, float]:
        counts = self.namespaces.get(namespace) or _Audits()
        return {
            "audits": counts.audits,
            "audit_disagreements": counts.disagreements,
            "recent_audits": len(counts.recent),
            "recent_audit_disagreements": counts.recent.count(False),
        }
