"""Has later prompts of an engine wait for a load however long this machine takes, so that a test of their order is not
one of its speed."""

from blendhub.vllm.scheduler import load_scheduler


def wait() -> None:
    load_scheduler.LEAST_S = 60.0
