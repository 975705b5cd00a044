"""What vLLM asks the connector in a worker. This side does nothing: the model is served without reuse, or its check has
yet to come."""

from blendhub.vllm.messages import LoadJob, StepPlan, WorkerReport


class WorkerSide:
    """All methods are called by the worker's own thread, and none waits for the hub but ``close``.

    A step of vLLM calls ``begin_step``, launches its forward, and calls ``load``, ``save`` and ``finished``; in some
    runners ``load`` comes before the forward.
    """

    def begin_step(self, plan: StepPlan) -> None:
        """Before vLLM computes: order it behind reads of blocks that it will overwrite, and begin the new loads."""

    def load(self, plan: StepPlan) -> None:
        """Continue the loads, within the step's budget of recomputed tokens."""

    def save(self, plan: StepPlan) -> None:
        """Begin to save what this step has computed."""

    def finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks can be freed, and the requests whose KV is loaded."""
        return set(), set()

    def take_failed(self) -> list[LoadJob]:
        """The loads that have failed, and whose requests were not aborted."""
        return []

    def take_report(self) -> WorkerReport | None:
        """What the scheduler has yet to hear."""
        return None

    def detach(self) -> None:
        """Wait for all copies, and begin none until ``attach``. Loads fail, because what they have written is lost."""

    def attach(self) -> None:
        """Copy again. vLLM may load other weights before its next step."""

    def close(self) -> None:
        """Finish the copies that were begun, and leave the hub."""
