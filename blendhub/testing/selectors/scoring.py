"""How far stored KV is from the fresh one. Needs torch; skipped without it."""

from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import pytest

from blendhub.contracts import Selector
from blendhub.testing.selectors.base import SelectorTests
from blendhub.testing.sentences import holds

if TYPE_CHECKING:
    from blendhub.contracts.selector import KeysAndValues

TYPES = ("float32", "bfloat16", "float16")
TOKENS, HEADS = 37, 6


def _import_torch() -> Any:
    return pytest.importorskip("torch", reason="scores are taken of tensors: pip install torch")


def _kv(seed: int, dtype: str = "float32", tokens: int = TOKENS) -> "KeysAndValues":
    torch = _import_torch()
    generator = torch.Generator().manual_seed(seed)
    # Keys and values of different widths, as some models have them.
    keys, values = (torch.randn(tokens, HEADS, width, generator=generator) for width in (16, 24))
    return keys.to(getattr(torch, dtype)), values.to(getattr(torch, dtype))


def _heads(kv: "KeysAndValues", part: slice) -> "KeysAndValues":
    return kv[0][:, part], kv[1][:, part]


@holds("How far n tokens' stored KV is from the fresh one, at the probed layer:")
class ScoringTests(SelectorTests):
    """Shape and type of scores, and that ranks may add up theirs."""

    is_probing = True

    def test_one_float32_a_token(self, selector: Selector) -> None:
        for dtype, tokens in product(TYPES, (0, 1, TOKENS)):
            score = selector.score(_kv(1, dtype, tokens), _kv(2, dtype, tokens))
            assert score.shape == (tokens,)
            assert str(score.dtype) == "torch.float32"
            assert (score >= 0).all()
        (keys, values), (old_keys, old_values) = _kv(1, "float16"), _kv(2, "float16")
        score = selector.score((3000 * keys, 3000 * values), (3000 * old_keys, 3000 * old_values))
        assert score.isfinite().all() and (score > 0).all(), "large values of half precision overflow"

    @holds("equal KV has the score 0.")
    def test_only_kv_that_differs_has_a_score(self, selector: Selector) -> None:
        for dtype in TYPES:
            fresh, stored = _kv(1, dtype), _kv(1, dtype)
            for tensor in fresh:
                tensor[11] += 1
            score = selector.score(fresh, stored)
            assert score[11] > 0
            assert score.count_nonzero() == 1

    @holds("The sum over all ranks, which hold different heads, must be the score of the")
    def test_ranks_may_add_up_their_scores(self, selector: Selector) -> None:
        torch = _import_torch()
        for dtype, cuts in product(TYPES, [(0, 3, 6), (0, 1, 2, 3, 4, 5, 6), (0, 5, 6)]):
            fresh, stored = _kv(1, dtype), _kv(2, dtype)
            parts = [slice(*ends) for ends in pairwise(cuts)]
            added = sum(selector.score(_heads(fresh, part), _heads(stored, part)) for part in parts)
            torch.testing.assert_close(added, selector.score(fresh, stored), rtol=1e-4, atol=1e-6)

    @holds("Stays on the tensors' device, never waits for it, and changes no tensor.")
    def test_tensors_are_neither_changed_nor_waited_for(self, selector: Selector) -> None:
        """Meta tensors have a shape and no values: whatever asks for one fails."""
        for dtype in TYPES:
            fresh, stored = _kv(1, dtype), _kv(2, dtype)
            selector.score(fresh, stored)
            for tensor, before in zip((*fresh, *stored), (*_kv(1, dtype), *_kv(2, dtype)), strict=True):
                assert tensor.equal(before)
        fresh, stored = ((keys.to("meta"), values.to("meta")) for keys, values in (_kv(1), _kv(2)))
        score = selector.score(fresh, stored)
        assert score.device.type == "meta", "the score left the tensors' device"
        assert score.shape == (TOKENS,)
