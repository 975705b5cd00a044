"""Has an engine's blocks be too few to blend a prompt of a model with windows."""

from blendhub.vllm.scheduler import scratch


def lend_few():
    scratch.MOST_BORROWED = 0.001
