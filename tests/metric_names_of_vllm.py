"""The adapter's metrics by their names, with their meanings, from the tables that the code is made from."""

from blendhub.vllm.watching.metrics import COUNTERS, DIVERGENCE, EXPECTED, FIRST_TOKENS, LABELLED, OF_AUDITS, SECONDS
from blendhub.vllm.watching.stats import FIRST_TOKEN

_TOTALS = [*COUNTERS.items(), *((name, about) for name, _, about in LABELLED.values()), *OF_AUDITS.items()]
OF_ENGINE = {
    **{f"{name}_total": about for name, about in _TOTALS},
    **SECONDS,
    FIRST_TOKEN: FIRST_TOKENS,
    "audit_kl": DIVERGENCE,
    "expected_agreement_ratio": EXPECTED,
}
"""Without the prefix ``vllm:blendhub_``."""
