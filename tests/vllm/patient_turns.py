"""Later prompts of an engine wait for a lookup and a load however long that takes: a test of order is none of speed."""

from blendhub.vllm.scheduler import blend_queue, lookups


def wait() -> None:
    blend_queue.LEAST_S = 60.0
    lookups.LOOKUP_WAIT_S = 10.0
