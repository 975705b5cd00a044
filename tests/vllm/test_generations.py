"""Requests whose prompts are edited again and again: how far their KV is from exact KV, and that this has a bound."""

import msgspec
import pytest

from tests.vllm.played_engine import SETTINGS, played_engine, text

LENGTH = 96


@pytest.fixture
def engine():
    with played_engine(settings=msgspec.structs.replace(SETTINGS, max_generation=2)) as engine:
        engine.serve("first", turn(0))
        yield engine


def turn(number: int) -> list[int]:
    return text(number, LENGTH)


def serve(engine, name: str, *turns: int, **asked) -> dict:
    """Serve a prompt of these turns; returns its report."""
    return engine.serve_and_report(name, [token for number in turns for token in turn(number)], **asked)


def test_each_move_of_what_was_computed_behind_moved_text_is_a_generation_up_to_the_bound(engine):
    assert serve(engine, "one edit", 20, 0, 1)["generation"] == 1
    facts = serve(engine, "two edits", 21, 1, 2)
    assert (facts["generation"], facts["moved_tokens"]) == (2, LENGTH)
    facts = serve(engine, "three edits", 22, 2, 3)
    assert (facts["generation"], facts["moved_tokens"]) == (0, 0)
    assert "max_generation" in facts["reason"]
    assert engine.counters["refused_too_old"] == 1
    assert (engine.counters["generation_1"], engine.counters["generation_2"]) == (1, 1)
    # It was computed behind exact text this time.
    assert serve(engine, "another edit", 23, 2, 4)["generation"] == 1


def test_a_conversation_that_goes_on_behind_the_same_text_does_not_drift(engine):
    turns = [20, 0, 1]
    for number in range(5):
        assert serve(engine, f"turn {number}", *turns)["generation"] == 1
        turns.append(2 + number)


def test_what_vllm_s_own_cache_has_of_blended_text_counts_as_well(engine):
    serve(engine, "one edit", 20, 0, 1)
    serve(engine, "two edits", 21, 1, 2)
    prompt = [token for number in (21, 1, 2, 3) for token in turn(number)]
    request = engine.request("goes on", prompt)
    engine.side.arrived(request)
    engine.load(request, local=3 * LENGTH)
    assert engine.report("goes on")["generation"] == 2


def test_of_two_copies_the_one_nearer_to_exact_kv_is_moved(engine):
    serve(engine, "one edit", 20, 0, 1)
    serve(engine, "two edits", 21, 1, 2)
    serve(engine, "computed", 2)
    serve(engine, "blended again", 24, 1, 2, settled=False)
    assert serve(engine, "moved", 25, 2)["generation"] == 1
