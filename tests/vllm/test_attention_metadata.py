"""Metadata of BlendHub's own forwards: bounded, and built so that a device that copies late reads what was built."""

from functools import partial
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
from blendhub.vllm.model.attention_metadata import SPANS, TABLE_BYTES, AttentionMetadata, OwnGroup
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.upstream import Upstream
from tests.stand_in import StandIn

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


def metadata(max_model_len, max_num_seqs=1024, builder=Builder):
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    backend = type("Backend", (CPUAttentionBackend,), {"get_builder_cls": staticmethod(lambda: builder)})
    of_vllm = AttentionGroup(backend, ["layer"], spec, 0)
    of_vllm.metadata_builders = [builder(spec, ["layer"], None, torch.device("cpu"))]
    runner = StandIn(
        block_groups=[StandIn(kv_cache_spec=spec)],
        attention_groups=[[of_vllm]],
        kernel_block_sizes=[BLOCK_SIZE],
        device=torch.device("cpu"),
    )
    model, scheduler = StandIn(max_model_len=max_model_len), StandIn(max_num_seqs=max_num_seqs)
    config: Any = StandIn(compilation_config=StandIn(), model_config=model, scheduler_config=scheduler)
    return AttentionMetadata(runner, Upstream(), config)


def table_of(made, *parts):
    nothing = torch.zeros(0, dtype=torch.int64)
    return made.build(RecomputeSet(parts), nothing, [nothing])["layer"]


@pytest.mark.parametrize("length, max_spans", [(2**11, 1024), (2**17, 1024), (2**20, 512), (2**30, 1)])
def test_the_tables_of_a_forward_stay_within_the_bound_whatever_the_number_of_spans(length, max_spans):
    made = metadata(length)
    assert made.max_spans == max_spans
    if length == 2**30:  # one span is computed even if its row alone is longer
        return
    starts = np.linspace(0, length - 4, max_spans, dtype=np.int64).tolist()
    blocks = np.zeros(-(-length // BLOCK_SIZE), np.int64)
    table = table_of(
        made, RequestTokens(np.zeros(length, np.uint32), [blocks], [Span(start, start + 4) for start in starts])
    )
    assert table.shape == (max_spans, length // BLOCK_SIZE) and table.nbytes == made.table_bytes <= TABLE_BYTES


def test_a_forward_has_hundreds_of_spans_in_an_engine_of_few_requests_and_no_more_than_mla_has_memory_for():
    made = metadata(2**11, max_num_seqs=4)
    assert made.max_spans == SPANS > 4
    assert made._groups[0][1].first.get_metadata_builder().config.scheduler_config.max_num_seqs == SPANS
    made = metadata(2**11, max_num_seqs=64, builder=WithWorkspace)
    ours = made._groups[0][1].first.get_metadata_builder()
    assert made.max_spans == 10 and len(ours.chunked_prefill_workspace) == 10 * BLOCK_SIZE


def test_each_span_has_the_row_of_its_own_prompt():
    nothing = np.zeros(0, np.uint32)
    first = RequestTokens(nothing, [np.array([5, 3, 9])], [Span(0, 40), Span(70, 71)])
    second = RequestTokens(nothing, [np.array([7])], [Span(2, 10)])
    # The shortest spans come first.
    assert table_of(metadata(2**11), first, second)[:, :3].tolist() == [[5, 3, 9], [7, 0, 0], [5, 3, 9]]


class Device:
    """Work waits until something synchronizes; an event is reached when all work before it was done."""

    def __init__(self):
        self.pending = []
        self.n_done = 0
        self.waits = []
        """For each wait: how many pieces of work were submitted after what it waited for."""

    def run_to(self, n):
        while self.n_done < n:
            self.pending[self.n_done]()
            self.n_done += 1

    def new_event(self):
        event = SimpleNamespace(reached=0)

        def synchronize():
            self.waits.append(len(self.pending) - event.reached)
            self.run_to(event.reached)

        event.record = lambda: setattr(event, "reached", len(self.pending))
        event.synchronize = synchronize
        return event


@pytest.mark.parametrize("keeps", ["nothing", "itself", "in a plan"])
def test_only_builders_that_keep_host_memory_take_turns_and_none_waits_for_the_last_forward(keeps):
    device, made = Device(), []

    def create():
        memory = torch.zeros(1)
        builder = (
            StandIn(itself=memory) if keeps == "itself" else StandIn(plan=[memory] if keeps == "in a plan" else [])
        )
        made.append(builder)
        return StandIn(get_metadata_builder=lambda: builder, memory=memory)

    def build(group, number):
        """Has a builder's memory, or that of a moment, hold a number; the device reads it later."""
        memory = torch.zeros(1) if keeps == "nothing" else group.memory
        numbers = []
        memory.fill_(number)
        device.pending.append(lambda: numbers.append(int(memory)))
        return numbers

    group, seen = OwnGroup(create, device.new_event), []
    for number in range(10):
        seen.append(group.build(partial(build, number=number)))
        device.pending.append(lambda: None)  # the rest of the forward
    device.run_to(len(device.pending))
    assert [numbers[0] for numbers in seen] == list(range(10)), "the device read what a later build has overwritten"
    # They wait with a whole forward submitted behind, which is two pieces of work here, and the end of another one.
    assert (len(made), device.waits) == ((1, []) if keeps == "nothing" else (2, [3] * 8))
