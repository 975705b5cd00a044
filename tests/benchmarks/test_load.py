"""The prompts of the load benchmark, as vLLM's own client reads them, and what is made of the client's results."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from benchmarks.load.client import measured_of
from benchmarks.load.traces import DOCUMENTS, PIECE_TOKENS, Traces
from harness.engines.tiny_model import make_tiny_model
from harness.engines.words import add_tokenizer


@pytest.fixture(scope="module")
def prompts_of(tmp_path_factory):
    """The tokens that vLLM's client makes of a load's prompts."""
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets.datasets import TimedTrace

    folder = tmp_path_factory.mktemp("load")
    model = make_tiny_model(folder / "model")
    add_tokenizer(model, 1000)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    labels = {
        f"timed_trace_label_{ours}": theirs
        for ours, theirs in [("timestamp",) * 2, ("input_length",) * 2, ("output_length",) * 2, ("hash_ids",) * 2]
    }

    def prompts(load):
        path = str(load.write(folder / "trace.jsonl"))
        trace = TimedTrace(dataset_path=path, timed_trace_chunk_hash_size=PIECE_TOKENS, **labels)
        return [one.prompt for one in trace.sample(tokenizer, len(load.prompts))]

    return prompts


def test_documents_are_the_same_tokens_in_every_prompt_and_all_else_is_new(prompts_of):
    traces = Traces(60)
    documents = [tuple(one) for one in prompts_of(traces.alone())]
    assert len(set(documents)) == DOCUMENTS and all(len(one) == 60 for one in documents)
    moved = prompts_of(traces.moved(20, 3, 4))
    assert all(len(one) == 3 * 60 + 2 * PIECE_TOKENS for one in moved)
    orders = {tuple(tuple(one[at : at + 60]) for at in range(20, 200, 60)) for one in moved}
    assert len(orders) > 15 and {one for order in orders for one in order} <= set(documents)
    novel = [*(tuple(one[:20]) for one in moved), *(tuple(one[-20:]) for one in moved)]
    novel += [tuple(one) for one in prompts_of(traces.novel(5, 20, 1))]
    assert len(set(novel)) == 45
    assert max(map(max, moved)) < 1000 and min(map(min, moved)) > 1


def test_failed_requests_are_counted_and_measured_no_more():
    result = {"errors": ["", "refused", ""], "ttfts": [0.5, 9.0, 0.7], "itls": [[0.1, 0.3], [], []], "duration": 4.0}
    measured = measured_of(result)
    assert measured.first_token == [0.5, 0.7] and measured.per_token == [pytest.approx(0.2)]
    assert measured.failed == 1 and measured.rate == 0.5 and measured.first_token_at(50) == pytest.approx(0.6)
