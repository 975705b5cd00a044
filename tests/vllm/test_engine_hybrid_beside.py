"""Models with several block tables, with BlendHub beside another connector in vLLM's ``MultiConnector``.

vLLM keeps its hybrid allocator on there if all connectors support it.
"""

import json

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GEMMA3, GPT_OSS
from tests.vllm.conftest import TOLERANCE
from tests.vllm.test_engine_hybrid import capacity
from tests.vllm.test_engine_other_connectors import OFFLOADING, OURS, SIMPLE, beside, two_connectors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ALONE = {"mode": "off", "store": False}
"""Options of a request for which BlendHub reuses and stores nothing."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    def started(shape, **options):
        path = tmp_path_factory.mktemp(shape["model_type"])
        (path / "config.json").write_text(json.dumps(shape))
        arrange = ["tests.vllm.offloading_on_cpus:without_cuda_and_wide"]
        common = {"load_format": "dummy", "seed": 7, "disable_hybrid_kv_cache_manager": False}
        return Engine(path, arrange=arrange, **{**common, **options})

    return started


@pytest.fixture(scope="module", params=[GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def plain(start, shape):
    with start(shape) as plain:
        yield plain


def failures(engine):
    return [name for name in engine.call("counts") if "failed" in name]


@pytest.mark.parametrize("other", [OFFLOADING, SIMPLE], ids=["offloading", "simple"])
def test_text_is_moved_before_a_connector_that_offloads_and_none_of_it_is_offloaded_as_exact(
    shape, plain, other, start, texts
):
    document, lead, question = texts.new(700), texts.new(130), texts.new(60)
    blended, goes_on = [*lead, *document, *question], [*document, *texts.new(90)]
    expected = {name: plain.one(asked, tokens=40) for name, asked in [("blended", blended), ("on", goes_on)]}
    with start(shape, **beside(OURS, other)) as engine:
        assert capacity(engine) == capacity(plain) and "text is reused anywhere" in engine.log
        for text in (document, lead):
            engine.one(text, tokens=4)
            engine.forget()
        exact = engine.one(goes_on, tokens=40, store=False)
        assert exact.report["exact_tokens"] == 700
        assert disagreement([exact], [expected["on"]]) < TOLERANCE
        engine.forget()
        whole = engine.one(blended, tokens=40, recompute_ratio=1.0, store=False)
        assert whole.report["moved_tokens"] >= 600
        assert disagreement([whole], [expected["blended"]]) < TOLERANCE
        engine.forget()
        assert engine.one(blended, tokens=40).report["moved_tokens"] >= 600
        engine.forget()
        # BlendHub is asked to do nothing: what is found is the other connector's.
        found = engine.one(goes_on, tokens=40, **ALONE)
        assert found.cached >= 640 and disagreement([found], [expected["on"]]) < TOLERANCE
        engine.forget()
        computed = engine.one(blended, tokens=40, **ALONE)
        assert computed.cached <= 128, "the other connector has no more than what was computed exactly"
        assert disagreement([computed], [expected["blended"]]) < TOLERANCE
        assert not failures(engine)


@pytest.mark.parametrize("other", [OFFLOADING, SIMPLE], ids=["offloading", "simple"])
def test_behind_such_a_connector_exact_text_alone_is_reused_and_what_it_loads_is_not_stored_with_gaps(
    shape, plain, other, start, texts
):
    """It loads the last window of a prefix, and BlendHub stores what vLLM computes behind that."""
    document, question, rest = texts.new(700), texts.new(150), texts.new(30)
    goes_on, moved = [*document, *question], [*texts.new(90), *document]
    expected = [plain.one(asked, tokens=40) for asked in (goes_on, moved, [*goes_on, *rest])]
    with start(shape, **beside(other, OURS)) as engine:
        assert "name BlendHubConnector before it in connectors" in engine.log
        engine.one(document, tokens=4, store=False)
        engine.forget()
        brought = engine.one(goes_on, tokens=40)
        assert brought.cached >= 640 and brought.report["exact_tokens"] == 0
        engine.forget()
        unmoved = engine.one(moved, tokens=40)
        assert unmoved.report["moved_tokens"] == 0
        engine.forget()
        engine.one(document, **ALONE)  # for vLLM's own cache
        # The other connector has this text, too, and is asked first, if it is allowed to load it.
        engine.call("inside", "tests.vllm.offloading_on_cpus:find_nothing")
        behind = engine.one([*goes_on, *rest], tokens=40)
        assert behind.report["engine_tokens"] >= 640 and behind.report["exact_tokens"] >= 120
        assert disagreement([brought, unmoved, behind], expected) < TOLERANCE
        assert not failures(engine)


def test_a_connector_that_does_not_support_the_allocator_ends_the_start_or_turns_it_off(start, tmp_path, texts):
    """vLLM decides that: with its own example, which supports one block table only."""
    connectors = two_connectors(tmp_path / "kv")
    with pytest.raises(RuntimeError, match="support"):
        start(GEMMA3, **connectors)
    document = texts.new(300)
    with start(GEMMA3, disable_hybrid_kv_cache_manager=None, **connectors) as engine:
        assert "Turning off hybrid kv cache manager" in engine.log
        engine.one(document)
        engine.forget()
        assert engine.one([*document, *texts.new(9)]).report["exact_tokens"] == 300
