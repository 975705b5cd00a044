"""When a load copies from vLLM's own blocks, and how long these are held."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from blendhub import Span
from blendhub.vllm.messages import LoadResult, WorkerReport
from tests.vllm.played_engine import BLOCK, played_engine, text

DOCUMENT = text(0, 96)
MOVED = Span(40, 136)


@pytest.fixture
def engine():
    """A document is stored, and vLLM still has its blocks 201 to 206."""
    with played_engine() as engine:
        hashes = engine.request("hashes", DOCUMENT).block_hashes
        engine.serve("document", DOCUMENT)
        engine.blocks.kept = {
            name: SimpleNamespace(block_id=201 + number, ref_cnt=0) for number, name in enumerate(hashes)
        }
        yield engine


def prompt(number):
    """A prompt that moves the document."""
    return [*text(number, 40), *DOCUMENT, *text(number + 1, 24)]


def begin(engine, name="moving", number=10, **computed):
    """The load of such a prompt, in a step that computes these tokens of others."""
    request = engine.arrived(name, prompt(number))
    n_external, _ = engine.turn(request)
    assert n_external == MOVED.end
    engine.side.allocated(request, engine._tables(n_external), n_external)
    engine.step(**computed)
    (job,) = engine.loads
    return job


def end(engine, job, error=""):
    engine.client.release(job.source.lease).result()
    engine.side.process_report(WorkerReport(loads={job.request: LoadResult(error=error)}))


def held(engine):
    return [block.block_id for block in engine.blocks.kept.values() if block.ref_cnt]


def copied(job):
    return [(piece.span, piece.blocks.tolist(), piece.row, piece.source_start) for piece in sum(job.source.donors, ())]


WHOLE = [(MOVED, [201, 202, 203, 204, 205, 206], 0, 0)]


@pytest.mark.parametrize("error", ["", "the accelerator is lost"])
def test_blocks_that_a_load_reads_are_held_until_it_has_ended_on_all_ranks_and_counted(engine, error):
    job = begin(engine)
    assert copied(job) == WHOLE and held(engine) == [201, 202, 203, 204, 205, 206]
    # As if it had been repaired before it was preempted, and what was held for that is given back.
    engine.side.requests.known["moving"].blocks.held_until = 0.0
    engine.step()
    assert len(held(engine)) == 6
    end(engine, job, error)
    assert not held(engine)
    loaded = (engine.counters["tokens_loaded_engine"], engine.counters["tokens_loaded_memory"])
    assert (loaded, engine.report("moving")["copied_tokens"]) == (((96, 0), 96) if not error else ((0, 0), 0))


def test_blocks_of_an_aborted_request_are_held_until_the_workers_have_stopped(engine):
    job = begin(engine)
    engine.side.ended(engine.side.requests.known["moving"].request, [])
    engine.step()
    assert len(held(engine)) == 6
    end(engine, job, "aborted")
    assert not held(engine)


def test_blocks_that_the_step_itself_computes_hold_no_kv_yet(engine):
    """Another request repeats the document: vLLM caches its blocks before any of it is computed."""
    engine.serve("other", text(5, 64))
    again = engine.arrived("again", DOCUMENT)
    engine.side.allocated(again, engine._tables(0), 0)
    engine.blocks.blocks = [*range(201, 207), *range(1, 90)]
    job = begin(engine, again=(2 * BLOCK, 40))
    assert copied(job) == [(Span(40, 72), [201, 202], 0, 0), (Span(120, 136), [206], 0, 80)]
    end(engine, job)
    job = begin(engine, "next", 12)
    assert copied(job) == WHOLE


def test_free_blocks_are_left_to_vllm_where_it_has_few_and_others_copied(engine):
    engine.blocks.n_free = 20
    list(engine.blocks.kept.values())[1].ref_cnt = 1
    job = begin(engine)
    assert copied(job) == [(Span(56, 72), [202], 0, 16)]
    end(engine, job)
    assert held(engine) == [202]


def test_a_load_holds_no_more_free_blocks_than_vllm_can_spare(engine):
    engine.blocks.n_free = 27  # 25 of 100 are left to it
    job = begin(engine)
    assert copied(job) == [(Span(40, 72), [201, 202], 0, 0)]
    end(engine, job)


def test_what_was_exactly_loaded_is_known_too_and_what_was_cleared_is_not(engine):
    donors = engine.side.loads._scratch.donors
    donors.clear()
    assert not begin(engine, "first").source.donors
    engine.serve("exactly", [*DOCUMENT, *text(6, 30)])
    assert copied(begin(engine, "second", 12)) == WHOLE
    engine.side.clear()
    engine.settle()
    assert not donors._runs
    engine.serve("anew", DOCUMENT)
    assert copied(begin(engine, "third", 14)) == WHOLE


def test_what_was_computed_behind_blended_text_comes_from_the_arena(engine):
    """What vLLM has under the hashes that follow from the tokens is other KV: exact."""
    blended, added = prompt(20), text(30, 64)
    engine.serve("blended", [*blended, *added])
    for number, name in enumerate(engine.request("hashes", [*blended, *added]).block_hashes):
        engine.blocks.kept[name] = SimpleNamespace(block_id=301 + number, ref_cnt=0)
    request = engine.arrived("moving", [*text(22, 40), *added, *text(23, 20)])
    engine.load(request)
    report = engine.report("moving")
    assert (report["moved_tokens"], report["copied_tokens"]) == (64, 0)


@pytest.mark.parametrize("n_kept, origins", [(6, (96, 0, 0)), (3, (48, 0, 48)), (0, (0, 26, 70))])
def test_what_the_hub_had_to_read_from_its_store_is_told_apart(engine, monkeypatch, n_kept, origins):
    """What vLLM has of it is copied nevertheless."""
    lookup = engine.side.client.lookup

    def look_up(*arguments, **options):
        answer = lookup(*arguments, **options)
        read = answer._read
        answer._read = lambda reply: replace(read(reply), fetched=(Span(60, 130),))
        return answer

    monkeypatch.setattr(engine.side.client, "lookup", look_up)
    for name in list(engine.blocks.kept)[n_kept:]:
        del engine.blocks.kept[name]
    engine.counters.clear()
    end(engine, begin(engine))
    assert tuple(engine.counters[f"tokens_loaded_{source}"] for source in ("engine", "memory", "store")) == origins
    report = engine.report("moving")
    assert (report["copied_tokens"], report["fetched_tokens"]) == (origins[0], origins[2])
