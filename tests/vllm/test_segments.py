"""Which of the texts that a prompt repeats become segments."""

from blendhub import Span
from blendhub.core.spans import NOWHERE
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.costs import Cost, Costs
from blendhub.vllm.scheduler.segments import MAX_SEGMENTS, segments_to_make

TEXT = Span(0, 100_000)


def repeated(*spans, code=Why.NO_MAP):
    return [NotReused(Span(*span), code) for span in spans]


def costs(load):
    return Costs(
        prefill=Cost(1.0), probe=Cost(0.0), recompute=Cost(1.0), load=Cost(load), engine_tokens=100, token_bytes=1.0
    )


def test_a_segment_is_a_repeated_text_without_its_first_tokens_and_its_last_ones():
    staying = [*repeated((100, 400), (500, 520), (600, 900)), *repeated((1000, 2000), code=Why.NO_STATE)]
    assert segments_to_make(staying, TEXT, 0, 10.0, None) == (Span(132, 384), Span(632, 884))


def test_what_may_not_move_and_what_vllm_has_or_computes_last_is_none():
    staying = repeated((100, 900))
    assert segments_to_make(staying, Span(300, 801), 0, 10.0, None) == (Span(332, 785),)
    assert segments_to_make(staying, TEXT, 256, 10.0, None) == (Span(256, 884),)
    assert segments_to_make(staying, TEXT, NOWHERE, 10.0, None) == ()


def test_texts_whose_map_is_too_large_or_takes_longer_than_to_compute_them_do_not_pay():
    staying = repeated((0, 400), (1000, 6000))
    assert segments_to_make(staying, TEXT, 0, 10_000.0, None) == (Span(1032, 5984),)
    assert len(segments_to_make(staying, TEXT, 0, 2000.0, costs(0.1))) == 2
    assert segments_to_make(staying, TEXT, 0, 2000.0, costs(0.5)) == (Span(1032, 5984),)
    assert segments_to_make(staying, TEXT, 0, 2000.0, costs(1.0)) == ()


def test_one_prompt_makes_few_maps():
    staying = repeated(*((n, n + 500) for n in range(0, 50_000, 1000)))
    assert len(segments_to_make(staying, TEXT, 0, 1.0, None)) == MAX_SEGMENTS
