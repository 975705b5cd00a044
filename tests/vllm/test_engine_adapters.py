"""LoRA adapters that are replaced: the weights that vLLM has loaded decide whose KV a request reads and stores."""

import os
from contextlib import contextmanager
from typing import Any

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.adapters import make_adapter
from tests.vllm.conftest import SETTINGS, reused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def engine(model):
    """It keeps one adapter, and drops it for the next one."""
    with Engine(model, SETTINGS, max_loras=1, max_cpu_loras=1, **LORA) as engine:
        yield engine


def replace(path, seed):
    """Other weights under the same names, of the same age."""
    before = {file: file.stat() for file in [*path.iterdir(), path]}
    make_adapter(path, seed)
    for file, stat in before.items():
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def asked(engine, prompt, lora, **said):
    """The answer to a prompt of which vLLM has cached nothing."""
    engine.forget()
    return engine.one(prompt, lora=lora, **said)


def computed(engine, prompt, lora):
    return asked(engine, prompt, lora, mode="off", store=False).kv(len(prompt) - 1)


@contextmanager
def failures_of(engine):
    """What fails meanwhile, by counter."""
    before, failed = engine.call("counts"), {}
    yield failed
    counts = engine.call("counts")
    failed |= {name: n - before.get(name, 0) for name, n in counts.items() if "failed" in name}
    for name in [name for name, n in failed.items() if not n]:
        del failed[name]


@pytest.mark.versions
def test_an_adapter_whose_files_were_replaced_gets_nothing_of_the_earlier_one(engine, texts, tmp_path):
    adapter, other = make_adapter(tmp_path / "one", 0), make_adapter(tmp_path / "two", 1)
    prompt, said = texts.new(300), {"lora": str(adapter)}
    first = asked(engine, prompt, **said)
    assert "adapter" in first.report["reason"] and reused(first) == 0
    again = asked(engine, prompt, **said)
    assert reused(again) == 299, "the first request is stored once its adapter is known"
    loaded = again.kv(299)
    old = computed(engine, prompt, **said)
    assert largest_difference(loaded, old) < 1e-5
    replace(adapter, 2)
    asked(engine, texts.new(30), str(other))
    asked(engine, prompt, **said)
    answer = asked(engine, prompt, **said)
    assert reused(answer) == 299, "the new one has its own"
    loaded, new = answer.kv(299), computed(engine, prompt, **said)
    assert largest_difference(old, new) > 0.01 and largest_difference(loaded, new) < 1e-5
    assert "has other weights than before" in engine.log
    # What vLLM has cached may be of the earlier adapter: nothing is stored behind it.
    longer = [*prompt, *texts.new(200)]
    engine.one(longer, **said)
    assert reused(asked(engine, longer, **said)) <= 300


def test_weights_decide_and_neither_name_nor_path(engine, texts, tmp_path, monkeypatch):
    """``x y`` and ``z`` are not ``x`` and ``y z``; a copy of an adapter is the same adapter. No adapter is blended."""
    for name, seed in (("z", 3), ("y z", 4), ("copy", 3)):
        make_adapter(tmp_path / name, seed)
        for place in [*(tmp_path / name).iterdir(), tmp_path / name]:
            os.utime(place, ns=(1, 1))
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
    assert largest_difference(loaded, computed(engine, prompt, ("x y", "z"))) < 1e-5


def test_an_adapter_that_is_loaded_in_place_before_a_request_is_noticed_before_its_load(engine, texts, tmp_path):
    """No step tells the scheduler of it in time: the worker refuses the load, and vLLM computes."""
    adapter = make_adapter(tmp_path / "one", 5)
    prompt, said = texts.new(300), {"lora": str(adapter)}
    asked(engine, prompt, **said)
    replace(adapter, 6)
    engine.call("load_in_place", str(adapter))
    longer = [*prompt, *texts.new(200)]
    with failures_of(engine) as failed:
        answer = asked(engine, longer, **said)
    served = answer.kv(499)
    assert "has other weights than when the request began" in answer.report["reason"]
    assert failed == {"loads_failed": 1, "saves_failed_AdapterReplaced": 1}
    new = computed(engine, longer, **said)
    assert largest_difference(served, new) < 1e-5
    assert reused(asked(engine, longer, **said)) == 0, "that request had begun with other weights"
    again = asked(engine, longer, **said)
    assert reused(again) == 499 and largest_difference(again.kv(499), new) < 1e-5
