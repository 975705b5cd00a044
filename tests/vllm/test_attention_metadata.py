"""How much device memory the block tables of one of BlendHub's forwards may take."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.core.spans import Span
from blendhub.vllm.model.attention_metadata import SPANS, TABLE_BYTES, AttentionMetadata
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.upstream import Upstream

BLOCK_SIZE = 32


class Builder(AttentionMetadataBuilder):
    """Answers with the table that it is given."""

    def __init__(self, spec, names, config, device):
        super().__init__(spec, names, config, device)
        self.config = config

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata.block_table_tensor


class WithWorkspace(Builder):
    """A builder like those for MLA, with memory for as many requests as vLLM serves."""

    def __init__(self, spec, names, config, device):
        super().__init__(spec, names, config, device)
        self.chunked_prefill_workspace_size = 10 * BLOCK_SIZE if config is None else 4000 * BLOCK_SIZE
        self.chunked_prefill_workspace = torch.zeros(self.chunked_prefill_workspace_size)


def metadata(max_model_len, max_num_seqs, builder=Builder):
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    backend = type("Backend", (CPUAttentionBackend,), {"get_builder_cls": staticmethod(lambda: builder)})
    of_vllm = AttentionGroup(backend, ["layer"], spec, 0)
    of_vllm.metadata_builders = [builder(spec, ["layer"], None, torch.device("cpu"))]
    runner: Any = SimpleNamespace(
        block_groups=[SimpleNamespace(kv_cache_spec=spec)],
        attention_groups=[[of_vllm]],
        kernel_block_sizes=[BLOCK_SIZE],
        device=torch.device("cpu"),
    )
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
    return AttentionMetadata(runner, Upstream(), config)


def largest_table(metadata, length, n_spans):
    """The block table of a forward that computes so many spans of 4 tokens, the last at the prompt's end."""
    starts = np.linspace(0, length - 4, n_spans, dtype=np.int64)
    spans = [Span(int(start), int(start) + 4) for start in starts]
    tokens, blocks = np.zeros(length, np.uint32), np.zeros(-(-length // BLOCK_SIZE), np.int64)
    return built(metadata, RequestTokens(tokens, [blocks], spans))


def built(metadata, *parts):
    nothing = torch.zeros(0, dtype=torch.int64)
    return metadata.build(RecomputeSet(parts), nothing, [nothing])["layer"]


@pytest.mark.parametrize("length", [2**11, 2**17, 2**20])
def test_the_tables_of_a_forward_stay_within_the_bound_whatever_the_number_of_spans(length):
    made = metadata(length, max_num_seqs=1024)
    table = largest_table(made, length, made.max_spans)
    assert table.shape == (made.max_spans, length // BLOCK_SIZE)
    assert table.nbytes == made.table_bytes <= TABLE_BYTES


def test_the_bound_takes_hold_before_the_builders_do():
    assert metadata(2**17, max_num_seqs=1024).max_spans == 1024
    assert metadata(2**20, max_num_seqs=1024).max_spans == 512


def test_an_engine_of_few_requests_computes_many_spans_at_once():
    """One request at a time has hundreds of them; builders get buffers for as many."""
    made = metadata(2**11, max_num_seqs=4)
    assert made.max_spans == SPANS > 4
    assert made._groups[0][1].first.get_metadata_builder().config.scheduler_config.max_num_seqs == SPANS


def test_mla_gathers_no_more_contexts_than_the_engine_has_memory_for():
    made = metadata(2**11, max_num_seqs=64, builder=WithWorkspace)
    assert made.max_spans == 10
    ours = made._groups[0][1].first.get_metadata_builder()
    assert len(ours.chunked_prefill_workspace) == ours.chunked_prefill_workspace_size == 10 * BLOCK_SIZE


def test_each_span_has_the_row_of_its_own_prompt():
    made = metadata(2**11, max_num_seqs=64)
    nothing = np.zeros(0, np.uint32)
    first = RequestTokens(nothing, [np.array([5, 3, 9])], [Span(0, 40), Span(70, 71)])
    second = RequestTokens(nothing, [np.array([7])], [Span(2, 10)])
    # The shortest spans come first.
    assert built(made, first, second)[:, :3].tolist() == [[5, 3, 9], [7, 0, 0], [5, 3, 9]]


def test_one_span_is_computed_even_if_its_row_alone_is_longer():
    length = 2**30
    made = metadata(length, max_num_seqs=1024)
    assert made.max_spans == 1 and made.table_bytes > TABLE_BYTES
