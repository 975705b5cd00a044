"""The prompts of the load benchmark, as vLLM's own client reads them, and what is made of the client's results."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from benchmarks.load.client import DOCUMENTS, PIECE_TOKENS, Traces, measured_of
from harness.engines.tiny_model import make_tiny_model
from harness.engines.words import add_tokenizer, numbered


def test_documents_are_the_same_tokens_in_every_prompt_and_all_else_is_new(tmp_path):
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets.datasets import TimedTrace

    model = make_tiny_model(tmp_path / "model")
    add_tokenizer(model, numbered(1000))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    labels = {f"timed_trace_label_{name}": name for name in ("timestamp", "input_length", "output_length", "hash_ids")}

    def prompts_of(load):
        path = str(load.write(tmp_path / "trace.jsonl"))
        trace = TimedTrace(dataset_path=path, timed_trace_chunk_hash_size=PIECE_TOKENS, **labels)
        return [tuple(asked.prompt) for asked in trace.sample(tokenizer, len(load.prompts))]

    traces = Traces(60)
    documents = prompts_of(traces.alone())
    assert len(set(documents)) == DOCUMENTS and {len(document) for document in documents} == {60}
    moved = prompts_of(traces.moved(20, 3, 4))
    assert {len(prompt) for prompt in moved} == {3 * 60 + 2 * PIECE_TOKENS}
    orders = {tuple(prompt[at : at + 60] for at in range(20, 200, 60)) for prompt in moved}
    assert len(orders) > 15 and {document for order in orders for document in order} <= set(documents)
    assert len({part for prompt in moved for part in (prompt[:20], prompt[-20:])}) == 40


def test_failed_requests_are_counted_and_measured_no_more():
    result = {"errors": ["", "refused", ""], "ttfts": [0.5, 9.0, 0.7], "itls": [[0.1, 0.3], [], []], "duration": 4.0}
    measured = measured_of(result)
    assert measured.first_token == [0.5, 0.7] and measured.per_token == [pytest.approx(0.2)]
    assert measured.failed == 1 and measured.rate == 0.5 and measured.first_token_at(50) == pytest.approx(0.6)
