"""Which blended blocks of vLLM's own cache a request may take: vLLM's own requests and hashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from blendhub.vllm.scheduler.blocks.hashes import RequestHashes, salt_block_hashes
from blendhub.vllm.scheduler.blocks.settled_blocks import SettledBlocks
from tests.stand_in import Anything

BLOCK = 4
init_none_hash(sha256)


def request(tokens, salt=None, lora=None):
    hasher = get_request_block_hasher(BLOCK, sha256)
    adapter = LoRARequest(lora, 1, lora) if lora else None
    sampling = SamplingParams(max_tokens=64)
    return Request("r", list(tokens), sampling, None, cache_salt=salt, lora_request=adapter, block_hasher=hasher)


class Cache(Anything):
    """vLLM's prefix cache, as far as it is asked here: the hashes of cached blocks."""

    def __init__(self):
        self.hashes = set()

    def cached_tokens(self, hashes, most):
        n = 0
        while n < most // BLOCK and n < len(hashes) and hashes[n] in self.hashes:
            n += 1
        return n * BLOCK


@pytest.fixture
def cache():
    return Cache()


@pytest.fixture
def settled(cache):
    return SettledBlocks(cache)


def serve(settled, cache, tokens, first=None, answer=(), ratio=0.15, least=None, **asked):
    """A request from its arrival to its end, blended from ``first`` on; how much vLLM had of it, and what was settled.

    ``least``: the ratio that it asks for.
    """
    one = request(tokens, **asked)
    hashes = RequestHashes(one)
    found = settled.find(hashes.own(), len(tokens), ratio if least is None else least)
    hashes.take(found)
    local = cache.cached_tokens(one.block_hashes, len(tokens) - 1)
    firsts = [found.first_approximate] if found and local > found.first_approximate else []
    ratios = [found.ratio] if firsts else []
    if first is not None:
        hashes.salt(first, BLOCK, local // BLOCK)
        firsts.append(first)
        ratios.append(ratio)
    if answer:
        one.append_output_token_ids(list(answer))
    cache.hashes.update(hashes.cached())
    if firsts:
        settled.add(hashes.own(), hashes.cached(), min(firsts), min(ratios))
    return local, found.first_approximate if firsts and found else None


@given(st.integers(1, 6), st.integers(0, 3 * BLOCK), st.data())
def test_what_is_found_is_what_was_cached_and_no_other_prefix_finds_it(blocks, answered, data):
    n = blocks * BLOCK + data.draw(st.integers(0, BLOCK - 1))
    first = data.draw(st.integers(0, n - 1))
    cache = Cache()
    settled = SettledBlocks(cache)
    tokens, answer = list(range(n)), list(range(500, 500 + answered))
    serve(settled, cache, tokens, first=first, answer=answer)
    local, _ = serve(settled, cache, [*tokens, *answer, 9999])
    assert local == (n + answered) // BLOCK * BLOCK
    at = data.draw(st.integers(0, n - 1))
    other = [*tokens[:at], 7777, *tokens[at + 1 :], *answer, 9999]
    assert serve(settled, cache, other)[0] <= at // BLOCK * BLOCK


def test_another_salt_and_another_adapter_find_nothing(settled, cache):
    serve(settled, cache, range(20), first=0, salt="a")
    for asked in ({}, {"salt": "b"}, {"lora": "x"}, {"salt": "a", "lora": "x"}):
        assert serve(settled, cache, range(20), **asked)[1] is None
    assert serve(settled, cache, range(20), salt="a") == (16, 0)


@pytest.mark.parametrize("own, found", [(12, (20, 4)), (20, (20, None))], ids=["fewer", "as many"])
def test_blended_blocks_are_taken_where_vllm_has_computed_fewer_itself(settled, cache, own, found):
    serve(settled, cache, range(20), first=4)
    cache.hashes.update(request(range(own)).block_hashes)
    assert serve(settled, cache, range(21)) == found


def test_up_to_a_block_that_was_evicted_blended_blocks_are_taken(settled, cache):
    one = request(range(20))
    hashes = RequestHashes(one)
    hashes.salt(4, BLOCK, 0)
    cache.hashes.update(hashes.cached())
    settled.add(hashes.own(), hashes.cached(), 4, 0.15)
    cache.hashes.remove(one.block_hashes[3])
    assert serve(settled, cache, range(20)) == (12, 4)


def test_of_two_prefixes_the_one_of_which_more_is_cached_is_taken(settled, cache):
    serve(settled, cache, range(24), first=4)
    # Another request had more of its own, and was blended later in the prompt.
    two = RequestHashes(request(range(24)))
    two.salt(12, BLOCK, 0)
    settled.add(two.own(), two.cached(), 12, 0.15)
    assert serve(settled, cache, range(24)) == (20, 4)
    cache.hashes.update(two.cached())
    settled.add(two.own(), two.cached(), 12, 0.15)
    assert serve(settled, cache, range(24)) == (20, 12)


def test_who_asks_for_more_recomputation_takes_nothing_that_had_less(settled, cache):
    serve(settled, cache, range(20), first=4, ratio=0.15)
    assert serve(settled, cache, range(20), least=0.1) == (16, 4)
    assert serve(settled, cache, range(20), least=0.2) == (4, None)


def test_the_blocks_used_longest_ago_are_forgotten(cache):
    settled = SettledBlocks(cache, most=8)
    for text in (0, 100, 0, 200):
        serve(settled, cache, range(text, text + 16), first=0)
        assert len(settled) <= 8
    assert serve(settled, cache, range(17))[1] == 0
    assert serve(settled, cache, range(100, 117))[1] is None
    settled.clear()
    assert serve(settled, cache, range(17))[1] is None


def test_text_blended_behind_the_last_whole_block_leaves_the_blocks_before_known(settled, cache):
    """Its salt is in a block that vLLM had cached already, under the hash from before."""
    serve(settled, cache, range(16), first=0)
    # 16 of 19 tokens are cached; the last three are moved text.
    assert serve(settled, cache, range(19), first=16, answer=range(100, 110)) == (16, 0)
    assert serve(settled, cache, [*range(19), *range(100, 110), 5]) == (28, 0)


def test_a_request_that_takes_nothing_after_all_has_its_own_hashes(settled, cache):
    serve(settled, cache, range(20), first=4)
    one = request(range(20))
    own, hashes = list(one.block_hashes), RequestHashes(one)
    hashes.take(settled.find(own, 20, 0.15))
    assert one.block_hashes != own
    one.append_output_token_ids([1, 2, 3, 4])
    hashes.take(None)
    assert one.block_hashes[:5] == own and len(one.block_hashes) == 6


@given(st.integers(BLOCK, 6 * BLOCK), st.integers(0, 3 * BLOCK), st.data())
def test_blocks_before_the_first_approximate_token_keep_their_hashes_and_no_other_does(n_tokens, answered, data):
    first = data.draw(st.integers(0, n_tokens - 1))
    plain, tainted, other = request(range(n_tokens)), request(range(n_tokens)), request(range(n_tokens))
    for one in (tainted, other):
        salt_block_hashes(one, first, BLOCK)
    assert {type(one) for one in tainted.block_hashes} == {type(one) for one in plain.block_hashes}, "as vLLM's own"
    if data.draw(st.booleans()):  # it is preempted, and blended anew
        before = list(tainted.block_hashes)
        salt_block_hashes(tainted, first, BLOCK)
        assert not set(before[min(first // BLOCK, n_tokens // BLOCK - 1) :]) & set(tainted.block_hashes)
    for one in (plain, tainted, other):
        for token in range(answered):
            one.append_output_token_ids(token)
    # A block that is not whole yet has no hash to be changed: then the link before it is, and what follows from it.
    changed = min(first // BLOCK, n_tokens // BLOCK - 1)
    assert tainted.block_hashes[:changed] == other.block_hashes[:changed] == plain.block_hashes[:changed]
    for hashes in zip(*(one.block_hashes[changed:] for one in (plain, tainted, other)), strict=True):
        assert len(set(hashes)) == 3
    assert len(tainted.block_hashes) == (n_tokens + answered) // BLOCK
