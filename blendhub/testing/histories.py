"""Histories and examples that hypothesis draws, the same in each run: the result must not depend on chance."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

WITHOUT_CHANCE: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


def run_histories(machine: Callable[[], RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Try histories of calls of a state machine, and shrink one that fails."""
    drawn = settings(max_examples=examples, stateful_step_count=steps, report_multiple_bugs=False, **WITHOUT_CHANCE)
    run_state_machine_as_test(machine, settings=drawn)  # type: ignore[arg-type]  # any function that makes one will do
