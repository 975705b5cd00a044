"""vLLM engines in separate processes, for tests, benchmarks and the demo; not part of any distribution."""

from engine_harness.answers import KV, Answer, Beside, deviation, disagreement, largest_difference
from engine_harness.engine import ENVIRONMENT, ONE_THREAD, Engine
from engine_harness.server import Server

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
