"""Up to which length of spans chosen tokens attend by the device, by the times that were measured."""

import math

import pytest

pytest.importorskip("vllm", reason="the adapter needs vLLM; `make setup` installs it")

from blendhub.vllm.worker.attention_choice import LENGTHS, longest_attended


@pytest.mark.parametrize(
    "ours, longest",
    [
        ((1, 1, 1, 1), math.inf),
        ((1, 1, 1, 3), LENGTHS[2]),
        ((1, 3, 1, 1), LENGTHS[0]),
        ((3, 1, 1, 1), 0),
    ],
    ids=["always", "but not for long spans", "only for the shortest", "not even for the shortest"],
)
def test_the_device_attends_where_it_is_faster_for_all_shorter_spans_too(ours, longest):
    assert longest_attended([ours, (2, 2, 2, 2)]) == longest
