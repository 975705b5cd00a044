"""vLLM engines in separate processes. Interpreters without BlendHub import this too."""

from harness.engines.answers import KV, Answer, Beside, deviation, disagreement, largest_difference
from harness.engines.engine import ENVIRONMENT, ONE_THREAD, Engine
from harness.engines.server import Server

__all__ = [
    "ENVIRONMENT",
    "KV",
    "ONE_THREAD",
    "Answer",
    "Beside",
    "Engine",
    "Server",
    "deviation",
    "disagreement",
    "largest_difference",
]
