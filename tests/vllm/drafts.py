"""What a speculating engine has proposed and accepted."""

from collections import Counter
from typing import Any

COUNTS: Counter[str] = Counter()


def count_drafts() -> None:
    """Have vLLM's scheduler count in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.make_spec_decoding_stats

    def counted(
        self: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *given: Any, **named: Any
    ) -> Any:
        COUNTS.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return make(self, stats, num_draft_tokens, num_accepted_tokens, *given, **named)

    Scheduler.make_spec_decoding_stats = counted


def counts() -> dict[str, int]:
    """The numbers since the last call."""
    taken = dict(COUNTS)
    COUNTS.clear()
    return taken
