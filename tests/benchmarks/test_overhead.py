"""How what BlendHub costs is compared with vLLM alone."""

import pytest

pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")

from benchmarks.overhead import in_pairs


def test_ours_is_divided_by_plain_whichever_is_asked_first_and_the_first_round_does_not_count():
    asked = []

    def measure(engine: float, number: int) -> list[float]:
        asked.append(engine)
        return [engine, engine * (number + 1)]

    assert in_pairs("engines", 2, measure, 2.0, 3.0) == [(1.5, 1.5), (1.5, 1.5)]
    assert asked == [3.0, 2.0, 2.0, 3.0, 3.0, 2.0]
