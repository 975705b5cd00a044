"""The sizes of what is measured."""

from typing import Any, NamedTuple

from harness.engines.tiny_model import TIMED


class Sizes(NamedTuple):
    warm_up_rounds: int
    """Before those whose throughput is measured: the first of any server are slow, and the arena's pages are new."""
    rounds: int
    document_tokens: int
    moved_prompts: int
    """Asked at once, of five documents each."""
    arrivals: int
    """Requests at each rate."""
    novel: tuple[tuple[int, int], ...]
    """Numbers of prompts, and the tokens of each."""
    questions: int
    watched: int
    """The number of questions that are compared: the first and the last ones."""
    requests: tuple[int, int]
    """The numbers of requests after which memory is read."""
    saturated: int
    """Moved prompts beside others that prefill."""
    model: dict[str, Any]
    options: dict[str, int | str]


FULL = Sizes(
    warm_up_rounds=2,
    rounds=3,
    document_tokens=500,
    moved_prompts=48,
    arrivals=60,
    novel=((48, 512), (12, 2048)),
    questions=300,
    watched=50,
    requests=(300, 3000),
    saturated=12,
    model=TIMED | {"vocab_size": 8000, "max_position_embeddings": 8192},
    options={"max_model_len": 8192, "max_num_batched_tokens": 2048},
)  # fmt: skip
QUICK = FULL._replace(
    warm_up_rounds=0,
    rounds=1,
    document_tokens=200,
    moved_prompts=6,
    arrivals=6,
    novel=((4, 200),),
    questions=6,
    watched=2,
    requests=(6, 12),
    saturated=2,
    model=FULL.model | {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256},
)
