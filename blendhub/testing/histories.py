"""Runs a state machine of hypothesis, which tries histories of calls and shrinks one that fails."""

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_histories(machine: Callable[[], RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            derandomize=True,  # the result must not depend on chance
            suppress_health_check=list(HealthCheck),
        ),
    )
