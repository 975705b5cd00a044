"""LoRA adapters that are replaced: the weights that vLLM has loaded decide whose KV a request reads and stores."""

import os
from typing import Any

import pytest

from harness.engines import Engine, disagreement, largest_difference
from tests.vllm.adapters import make_adapter
from tests.vllm.conftest import ROUNDING, SETTINGS, TOLERANCE, blended_prompt, reused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def engine(model):
    """It keeps one adapter, and drops it for the next one."""
    with Engine(model, SETTINGS, max_loras=1, max_cpu_loras=1, **LORA) as engine:
        yield engine


def make(path, seed):
    """Weights under the same names and of the same age as those of every other adapter."""
    make_adapter(path, seed)
    for place in [*path.iterdir(), path]:
        os.utime(place, ns=(1, 1))
    return str(path)


def asked(engine, prompt, lora, **said):
    """The answer to a prompt of which vLLM has cached nothing."""
    engine.forget()
    return engine.one(prompt, lora=lora, **said)


def computed(engine, prompt, lora):
    return asked(engine, prompt, lora, mode="off", store=False).kv(len(prompt) - 1)


@pytest.mark.versions
def test_an_adapter_whose_files_were_replaced_gets_nothing_of_the_earlier_one(engine, texts, tmp_path):
    adapter, other = make(tmp_path / "one", 0), make(tmp_path / "two", 1)
    prompt = texts.new(300)
    first = asked(engine, prompt, adapter)
    assert "adapter" in first.report["reason"] and reused(first) == 0
    again = asked(engine, prompt, adapter)
    assert reused(again) == 299, "the first request is stored once its adapter is known"
    loaded, old = again.kv(299), computed(engine, prompt, adapter)
    assert largest_difference(loaded, old) < ROUNDING
    make(tmp_path / "one", 2)
    asked(engine, texts.new(30), other)
    asked(engine, prompt, adapter)
    answer = asked(engine, prompt, adapter)
    assert reused(answer) == 299, "the new one has its own"
    loaded, new = answer.kv(299), computed(engine, prompt, adapter)
    assert largest_difference(old, new) > 0.01 and largest_difference(loaded, new) < ROUNDING
    assert "has other weights than before" in engine.log
    # What vLLM has cached may be of the earlier adapter: nothing is stored behind it.
    longer = [*prompt, *texts.new(200)]
    engine.one(longer, lora=adapter)
    assert reused(asked(engine, longer, adapter)) <= 300


def test_weights_decide_and_neither_name_nor_path(engine, texts, tmp_path):
    """``x y`` and ``z`` are not ``x`` and ``y z``; a copy of an adapter is the same adapter. No adapter is blended."""
    for name, seed in (("z", 3), ("y z", 4), ("copy", 3)):
        make(tmp_path / name, seed)
    engine.call("inside", "os:chdir", str(tmp_path))
    prompt = texts.new(300)
    asked(engine, prompt, None)
    assert reused(asked(engine, [*prompt, *texts.new(9)], None)) == 300, "without an adapter"
    asked(engine, prompt, ("x y", "z"))
    for lora, n_reused in ((("x", "y z"), 0), (("third", "copy"), 299)):
        asked(engine, texts.new(30), lora)
        assert reused(asked(engine, prompt, lora)) == n_reused
    assert reused(asked(engine, [*texts.new(40), *prompt], ("third", "copy"))) == 0
    loaded = asked(engine, prompt, ("third", "copy")).kv(299)
    assert largest_difference(loaded, computed(engine, prompt, ("x y", "z"))) < ROUNDING


def test_an_adapter_that_is_loaded_in_place_before_a_request_is_noticed_before_its_load(engine, texts, tmp_path):
    """No step tells the scheduler of it in time: the worker refuses the load, and vLLM computes."""
    adapter = make(tmp_path / "one", 5)
    prompt = texts.new(300)
    asked(engine, prompt, adapter)
    make(tmp_path / "one", 6)
    engine.call("load_in_place", adapter)
    longer = [*prompt, *texts.new(200)]
    before = engine.call("counts")
    answer = asked(engine, longer, adapter)
    served = answer.kv(499)
    failures = {name: n for name, n in engine.call("counts").items() if "failed" in name and n != before.get(name, 0)}
    assert failures == {"loads_failed": 1, "saves_failed_AdapterReplaced": 1}
    assert "has other weights than when the request began" in answer.report["reason"]
    new = computed(engine, longer, adapter)
    assert largest_difference(served, new) < ROUNDING
    assert reused(asked(engine, longer, adapter)) == 0, "that request had begun with other weights"
    again = asked(engine, longer, adapter)
    assert reused(again) == 499 and largest_difference(again.kv(499), new) < ROUNDING


def test_a_request_with_an_adapter_is_answered_as_without_reuse(engine, texts, tmp_path):
    """vLLM sets up its own forwards alone for adapters, so nothing is blended, and nothing repaired."""
    prompt, lora = blended_prompt(engine, texts), make(tmp_path / "one", 3)
    expected = asked(engine, prompt, lora, tokens=40, mode="off", store=False)
    answer = asked(engine, prompt, lora, tokens=40, repair="always", audit=True, store=False)
    assert not {"repair", "audit", "approximate_from"} & set(answer.report)
    assert disagreement([answer], [expected]) < TOLERANCE
