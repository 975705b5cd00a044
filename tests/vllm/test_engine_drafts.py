"""Drafters beside reuse: as many of their proposals are accepted behind reused text as without BlendHub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.engines import ONE_THREAD, Answer, Engine, disagreement, largest_difference
from tests.vllm.arrangements import arrange, count_drafts, counted, inside
from tests.vllm.conftest import ROUNDING, SETTINGS, TOLERANCE, store
from tests.vllm.drafters import make_model_and_head
from tests.vllm.shapes import LLAMA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OFF: dict[str, Any] = {"mode": "off", "store": False}
ANSWER = 40


def start(served: Path, **speculation: Any) -> Engine:
    """An engine whose drafter proposes three tokens, one after the other: threads that compute so little together wait
    for each other most of the time."""
    return Engine(
        served,
        SETTINGS,
        arrange=arrange(count_drafts),
        variables=ONE_THREAD,
        async_scheduling=False,
        speculative_config={"num_speculative_tokens": 3} | speculation,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_model_and_head(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module", params=["eagle", "draft_model"])
def engine(request: pytest.FixtureRequest, made: tuple[Path, Path]) -> Iterator[Engine]:
    """What proposes is a head whose layers are the model's, or the model itself."""
    model, head = made
    drafter = head if request.param == "eagle" else model
    with start(model, method=request.param, model=str(drafter)) as engine:
        assert "text is reused anywhere" in engine.log
        yield engine
        assert not [count for count in engine.call("counts") if "failed" in count]


def asked(engine: Engine, prompt: list[int], **options: Any) -> tuple[Answer, float]:
    """An answer, and the share of proposals that were accepted for it."""
    inside(engine, counted)
    answer = engine.one(prompt, tokens=ANSWER, **options)
    counts = inside(engine, counted)
    return answer, counts["accepted"] / counts["drafted"]


def test_proposals_are_accepted_and_the_drafter_s_kv_is_that_of_a_full_prefill(engine, texts):
    document, question = texts.new(330), texts.new(60)
    moved, goes_on = [*texts.new(130), *document, *question], [*document, *question]
    expected, shares, kv = {}, {}, {}
    for name, prompt in (("moved", moved), ("exact", goes_on)):
        expected[name], shares[name] = asked(engine, prompt, **OFF)
        kv[name] = expected[name].kv(len(prompt) - 1)
        engine.forget()
    assert min(shares.values()) > 0.5, "behind computed text it proposes what the model says"

    def check(name: str, answer: Answer, share: float) -> None:
        assert share == shares[name] and disagreement([answer], [expected[name]]) < TOLERANCE
        assert largest_difference(answer.kv(kv[name].shape[2]), kv[name]) < ROUNDING

    store(engine, document)
    loaded, share = asked(engine, goes_on, store=False)
    assert loaded.report["exact_tokens"] >= 329
    check("exact", loaded, share)
    hit, share = asked(engine, goes_on, **OFF)
    assert hit.report["engine_tokens"] >= 320
    check("exact", hit, share)
    engine.forget()
    blended, share = asked(engine, moved, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] >= 256
    check("moved", blended, share)
    engine.forget()
    # What was moved is as good for the drafter as for the model, also where vLLM finds it again.
    for ratio in (0.3, None):
        part, share = asked(engine, moved, store=False, **({"recompute_ratio": ratio} if ratio else {}))
        assert part.report["moved_tokens" if ratio else "settled_tokens"] >= 256 and share > 0.5
    engine.forget()
    # Once it is repaired, it is that of a full prefill.
    engine.one(moved, tokens=ANSWER, recompute_ratio=0.0, repair="always", store=False)
    hit, share = asked(engine, moved, **OFF)
    assert hit.report["engine_tokens"] >= 480
    check("moved", hit, share)
    engine.forget()


def test_a_drafter_of_another_shape_has_blocks_of_its_own(made, texts, tmp_path):
    """Its weights are drawn, so that its proposals are hardly ever accepted."""
    document = texts.new(330)
    prompts = [*texts.new(130), *document, *texts.new(60)], [*document, *texts.new(30)]
    facts = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | facts | {"rope_scaling": None}))
    drawn = {"method": "eagle", "model": str(tmp_path), "draft_load_config": {"load_format": "dummy"}}
    with start(made[0], **drawn) as engine:
        expected = []
        for prompt in prompts:
            expected.append(engine.one(prompt, tokens=24, **OFF))
            engine.forget()
        store(engine, document)
        blended = engine.one(prompts[0], tokens=24, recompute_ratio=1.0, store=False)
        engine.forget()
        exact = engine.one(prompts[1], tokens=24, store=False)
        assert inside(engine, counted)["drafted"] > 0
    assert blended.report["moved_tokens"] >= 256 and exact.report["exact_tokens"] >= 256
    assert disagreement([blended, exact], expected) < TOLERANCE
