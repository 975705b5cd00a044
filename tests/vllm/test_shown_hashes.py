"""Connectors that keep the hashes that they have seen never hold the hash of a text for blended KV of it."""

from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from blendhub.core.layout import Variant
from blendhub.vllm.scheduler.admission import Terms
from blendhub.vllm.scheduler.blocks.shown_hashes import ShownHashes
from blendhub.vllm.scheduler.request_state import RequestState, Stage

BLOCK, N = 4, 40
init_none_hash(sha256)


@given(st.lists(st.tuples(st.none() | st.integers(0, N - 1), st.booleans()), max_size=6))
def test_no_block_that_is_blended_has_a_kept_hash_of_its_text(attempts):
    """Each attempt of vLLM to schedule a request finds KV that is approximate from a position on, or exact KV."""
    hasher = get_request_block_hasher(BLOCK, sha256)
    one = Request("r", list(range(N)), SamplingParams(max_tokens=9), None, block_hasher=hasher)
    own = list(one.block_hashes)
    state = RequestState(one, Terms(Variant(), "blend", None, stores=True))
    state.stage = Stage.FOUND
    shown, kept = ShownHashes(BLOCK), []
    for first, is_allocated in attempts:
        assert one.block_hashes == own, "vLLM looks for the request's own blocks"
        if not shown.permit(state, first):
            first = None
        shown.show(state, first)
        # As OffloadingConnector does: what it has seen stays, and is never looked at again.
        kept += one.block_hashes[len(kept) :]
        if is_allocated:
            if first is not None:
                assert shown.is_salted(state)
                blended = range(first // BLOCK, len(own))
                assert not {kept[at] for at in blended} & set(own)
                assert not set(one.block_hashes[first // BLOCK :]) & set(own)
            else:
                assert not shown.is_salted(state) and one.block_hashes == own
            break
        shown.end_step()
