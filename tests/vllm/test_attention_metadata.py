"""Metadata of BlendHub's own forwards: bounded, and built so that a device that copies late reads what was built."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.core.spans import Span
from blendhub.vllm.model.attention_metadata import SPANS, TABLE_BYTES, AttentionMetadata, OwnGroup
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.upstream import Upstream
from harness.engines.shapes import GRANITE4
from tests.stand_in import StandIn
from tests.vllm.shapes import DEEPSEEK

BLOCK_SIZE = 32
CUTS = [(5, 9, [5, 6, 9]), (5, 2, [6, 9]), (10, 9, []), (1, 9, [1, 3, 5, 6, 9])]


@pytest.fixture
def made(tmp_path):
    """Makes metadata for a model with MLA. ``contexts``: for so many of a block vLLM's own builder has memory."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": BLOCK_SIZE, "max_model_len": 1024}
    config = EngineArgs(str(tmp_path), **options).create_engine_config()
    dims = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    prefills = MagicMock(requires_v_padding=False)
    config.compilation_config.static_forward_context["layer"] = StandIn(**dims, num_heads=4, prefill_backend=prefills)
    spec = MLAAttentionSpec(block_size=BLOCK_SIZE, dtype=torch.bfloat16, num_kv_heads=1, head_size=576)
    theirs, place = AttentionGroup(TritonMLABackend, ["layer"], spec, 0), torch.device("cpu")

    def make(max_model_len=1024, max_num_seqs=1024, contexts=2048):
        theirs.create_metadata_builders(config, place, BLOCK_SIZE)
        builder: Any = theirs.get_metadata_builder()
        builder.chunked_prefill_workspace_size = contexts * BLOCK_SIZE
        runner = StandIn(
            block_groups=[theirs], attention_groups=[[theirs]], kernel_block_sizes=[BLOCK_SIZE], device=place
        )
        config.model_config.max_model_len, config.scheduler_config.max_num_seqs = max_model_len, max_num_seqs
        return AttentionMetadata(runner, Upstream(), config)

    with set_current_vllm_config(config):
        yield make


@pytest.mark.parametrize("length, most, long", CUTS)
def test_the_long_spans_of_a_forward_are_its_last_tokens(length, most, long):
    parts = []
    for lengths in ([3, 6, 1], [5, 9]):
        ends = np.cumsum(lengths).tolist()
        spans = [Span(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        parts.append(RequestTokens(np.zeros(20, np.uint32), [np.arange(1, 9)], spans))
    whole = RecomputeSet(parts)
    some, others = whole.cut(length, most)
    assert list(map(len, others.spans)) == long and [*some.spans, *others.spans] == whole.spans
    assert (len(some), len(others)) == (len(whole) - sum(long), sum(long))
    for name in ("positions", "token_owners", "owners"):
        assert np.array_equal(np.append(getattr(some, name), getattr(others, name)), getattr(whole, name))


@pytest.mark.parametrize("length, max_spans", [(2**11, 1024), (2**20, 512), (2**30, 1)])
def test_the_tables_of_a_forward_stay_within_the_bound_but_for_one_span_whose_row_alone_is_longer(
    made, length, max_spans
):
    metadata = made(length)
    assert metadata.max_spans == max_spans and (metadata.table_bytes <= TABLE_BYTES) == (max_spans > 1)
    spans = [Span(start, start + 1) for start in range(max_spans)]
    part = RequestTokens(np.zeros(length, np.uint32), [np.zeros(length // BLOCK_SIZE, np.int64)], spans)
    assert metadata._table(RecomputeSet([part]), 0, length).nbytes == metadata.table_bytes


def test_a_forward_has_hundreds_of_spans_in_an_engine_of_few_requests_and_no_more_than_mla_has_memory_for(made):
    metadata = made(max_num_seqs=4)
    builder: Any = metadata._groups[0][1].first.get_metadata_builder()
    assert metadata.max_spans == SPANS == builder.vllm_config.scheduler_config.max_num_seqs
    assert made(contexts=10).max_spans == 10


def test_a_span_is_to_a_backend_what_a_request_is(made):
    first = RequestTokens(np.zeros(700, np.uint32), [np.arange(20, 42)], [Span(0, 600), Span(640, 641)])
    second = RequestTokens(np.zeros(300, np.uint32), [np.arange(50, 60)], [Span(130, 131), Span(200, 203)])
    chosen = RecomputeSet([first, second])
    slots = torch.from_numpy(chosen.slots(BLOCK_SIZE))
    parts = made().build(chosen, torch.from_numpy(chosen.positions), [slots])["layer"]
    # The spans of one token come first.
    ends, lengths, decodes = [641, 131, 203, 600], [1, 1, 3, 600], parts.num_decodes
    assert decodes >= 2 and parts.num_actual_tokens == len(chosen) == sum(lengths)
    tables = torch.cat([part.block_table[:, :2] for part in (parts.decode, parts.prefill)])
    assert tables.tolist() == [[20, 21], [50, 51], [50, 51], [20, 21]]
    assert parts.decode.seq_lens.tolist() == ends[:decodes]
    assert parts.prefill.query_start_loc.diff().tolist() == lengths[decodes:]
    # The keys before a span are gathered from the pages; a prompt's first span has none.
    assert parts.prefill.chunked_context.context_lens_list == [200, 0][decodes - 2 :]


def test_a_span_of_mamba2_keeps_no_state_from_within_it(tmp_path):
    """vLLM writes such a state into another block. With one block only, it would take the place of the last inputs."""
    (tmp_path / "config.json").write_text(json.dumps(GRANITE4))
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": True, "mamba_cache_mode": "align"}
    config = EngineArgs(str(tmp_path), **options).create_engine_config()
    cache, place = config.cache_config, torch.device("cpu")
    cache.hash_block_size = cache.cache_hit_alignment_tokens = BLOCK_SIZE
    shapes: dict[str, Any] = {"shapes": ((3, 4), (2, 8, 8)), "dtypes": (torch.float32,) * 2}
    keeping: dict[str, Any] = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    spec = MambaSpec(block_size=BLOCK_SIZE, mamba_cache_mode="align", **shapes, **keeping)
    backend: Any = Mamba2AttentionBackend
    theirs = AttentionGroup(backend, ["layer"], spec, 0)
    runner: Any = StandIn(
        block_groups=[theirs], attention_groups=[[theirs]], kernel_block_sizes=[BLOCK_SIZE], device=place
    )
    with set_current_vllm_config(config):
        theirs.create_metadata_builders(config, place, BLOCK_SIZE)
        metadata = AttentionMetadata(runner, Upstream(), config)
        for span, chunks in ((Span(0, 100), [0, 64, 100]), (Span(32, 170), [0, 32, 96, 138])):
            made = metadata.of_states(span, {0: 7}, [torch.zeros(0, dtype=torch.int64)])["layer"]
            assert made.checkpoint_meta is None and made.checkpoint_chunk_idx is None
            assert made.state_indices_tensor_p.tolist() == [7] and made.cu_chunk_seqlen_p.tolist() == chunks
            assert made.has_initial_states_p.tolist() == [made.prep_initial_states] == [span.start > 0]


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
