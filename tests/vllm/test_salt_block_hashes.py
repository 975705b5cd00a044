"""Blended KV is not found in vLLM's prefix cache: vLLM's own requests and hashes, tainted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from blendhub.vllm.scheduler.salt_block_hashes import can_salt, salt_block_hashes

BLOCK = 4
init_none_hash(sha256)


def request(n_tokens: int) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", list(range(n_tokens)), SamplingParams(max_tokens=64), None, block_hasher=hasher)


@given(st.integers(BLOCK, 6 * BLOCK), st.integers(0, 3 * BLOCK), st.data())
def test_blocks_before_the_first_approximate_token_keep_their_hashes_and_no_other_does(n_tokens, answered, data):
    first = data.draw(st.integers(0, n_tokens - 1))
    plain, tainted, other = request(n_tokens), request(n_tokens), request(n_tokens)
    for one in (tainted, other):
        assert can_salt(one)
        salt_block_hashes(one, first, BLOCK)
    for one in (plain, tainted, other):
        for token in range(answered):
            one.append_output_token_ids(token)
    # A block that is not whole yet has no hash to be changed: then the link before it is, and what follows from it.
    changed = min(first // BLOCK, n_tokens // BLOCK - 1)
    assert tainted.block_hashes[:changed] == other.block_hashes[:changed] == plain.block_hashes[:changed]
    for hashes in zip(*(one.block_hashes[changed:] for one in (plain, tainted, other)), strict=True):
        assert len(set(hashes)) == 3
    assert len(tainted.block_hashes) == (n_tokens + answered) // BLOCK


@given(st.integers(BLOCK, 6 * BLOCK), st.data())
def test_tainted_twice_nothing_of_the_first_time_is_found(n_tokens, data):
    """A request that is preempted is blended anew, perhaps from another token on."""
    once = request(n_tokens)
    first = data.draw(st.integers(0, n_tokens - 1))
    salt_block_hashes(once, first, BLOCK)
    before = list(once.block_hashes)
    salt_block_hashes(once, first, BLOCK)
    changed = min(first // BLOCK, n_tokens // BLOCK - 1)
    assert not set(before[changed:]) & set(once.block_hashes[changed:])


def test_a_tainted_hash_is_one_that_vllm_can_use():
    tainted = request(2 * BLOCK)
    kinds = {type(one) for one in tainted.block_hashes}
    salt_block_hashes(tainted, 0, BLOCK)
    assert {type(one) for one in tainted.block_hashes} == kinds


def test_a_prompt_shorter_than_a_block_cannot_be_tainted():
    assert not can_salt(request(BLOCK - 1))
    assert can_salt(request(BLOCK))
