"""What vLLM asks the connector's scheduler side, whether requests are served already, not yet, or without reuse."""

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub.outcome.reasons import Why
from blendhub.vllm.messages import StepPlan, WorkerReport
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.watching.stats import BlendHubStats

Matched = tuple[int | None, bool]


class SchedulerSide(ABC):
    """All methods are called by the scheduler's thread."""

    def successor(self, wait_s: float = 0.0) -> "SchedulerSide":
        """Who serves from now on. The start is waited for."""
        return self

    @abstractmethod
    def arrived(self, request: Request) -> None:
        """vLLM has a new request."""

    @abstractmethod
    def matched(self, request: Request, local: int) -> Matched:
        """The number of tokens after the first ``local`` that come from BlendHub, and whether they are loaded while the
        request waits; None: ask again in a later step."""

    @abstractmethod
    def allocated(self, request: Request, tables: Tables, n_external: int) -> None:
        """vLLM has allocated blocks for the tokens that ``matched`` returned."""

    @abstractmethod
    def plan(self, step: SchedulerOutput) -> StepPlan:
        """The workers' part of this step."""

    @abstractmethod
    def process_report(self, report: WorkerReport) -> None:
        """Take note of what the workers have done."""

    @abstractmethod
    def ended(self, request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Returns whether its blocks are still needed, and the report for the response."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether steps are needed although there is no request."""

    def take_stats(self) -> BlendHubStats | None:
        """The counts since the last call."""
        return None

    def clear(self) -> None:  # noqa: B027  what stores nothing has nothing to clear
        """Have the hub forget everything stored in this engine's namespaces."""

    def close(self) -> None:  # noqa: B027  nor to close
        """End what has begun to serve."""


class NotServed(SchedulerSide):
    """The model is served without reuse."""

    def __init__(self, reasons: tuple[str, ...] = ()) -> None:
        self._response = {"blendhub": {"reason": "; ".join(reasons)}}
        self._counters: Counter[str] = Counter()

    def arrived(self, request: Request) -> None:
        self._counters[f"refused_{Why.MODEL}"] += 1

    def matched(self, request: Request, local: int) -> Matched:
        return 0, False

    def allocated(self, request: Request, tables: Tables, n_external: int) -> None:
        pass

    def plan(self, step: SchedulerOutput) -> StepPlan:
        return StepPlan()

    def process_report(self, report: WorkerReport) -> None:
        pass

    def ended(self, request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        return False, self._response

    @property
    def has_work(self) -> bool:
        return False

    def take_stats(self) -> BlendHubStats | None:
        return BlendHubStats.taken_from(self._counters)
