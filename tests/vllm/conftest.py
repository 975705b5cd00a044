"""Engines that several tests use; each is started when the first test asks for it."""

import json
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines import KV, Answer, Engine, largest_difference
from harness.engines.tiny_model import make_tiny_model

SETTINGS: dict[str, Any] = {
    "hub": {"arena_gib": 0.25, "metrics": ""},
    "policy": {"min_donor_context": 0, "min_reused_tokens": 64},
    "recompute_ratio": 0.15,
    "lookup_timeout_s": 10.0,
    "audit_share": 0.0,
    "repair": "off",
    "doubt": 0.0,
    "doubt_pause_s": 60.0,
    "repair_share": 20.0,
    "repair_after_s": 30.0,
}
"""The settings of tests: all text is moved, also what was computed first, whether it pays with a tiny model or not, and
however busy the machine is.

No request is repaired or audited unless a test asks; its repair takes few steps then, and has time behind its answer.
"""

PROBING: dict[str, Any] = {"selector": {"name": "hkvd"}}
"""Some layers are computed before the selector chooses."""

ATTENDED: dict[str, Any] = {"selector": {"name": "attended", "options": {"layers": [0.5, 0.75]}}}
"""The end of the prompt says what it attends to before the selector chooses."""

TOLERANCE = 1e-3
"""The tolerance of log-probabilities that were computed in another order: see ``disagreement``."""

ROUNDING = 1e-5
"""The tolerance of KV in float32 that was computed in another order: see ``largest_difference``."""

ON_THE_SECOND_RUNNER: dict[str, Any] = {
    "prepare": ["tests.vllm.gpu_stand_ins"],
    "environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
}
"""vLLM's model runner V2, which is the usual one on GPUs."""

NO_AMX = pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's kernels for processors with AMX refuse this model in float32: 'expect weight to be bfloat16'",
)


class AdapterTests(pytest.Module):
    """A file of tests, which is skipped where it cannot be imported for want of vLLM."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError:
            if find_spec("vllm"):
                raise
            pytest.skip("the adapter's tests need vLLM; `make setup` installs it")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> AdapterTests:
    return AdapterTests.from_parent(parent, path=module_path)


class Texts:
    """Makes text that no engine or hub has stored."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def new(self, n: int) -> list[int]:
        return self._random.integers(10, 990, n).tolist()


def reused(answer: Answer) -> int:
    """How many of a prompt's tokens were not computed, beyond those in vLLM's own cache."""
    return sum(answer.report[f"{fate}_tokens"] for fate in ("exact", "settled", "moved"))


def capacity(engine: Engine) -> str:
    """How many tokens vLLM has room for, as it says."""
    (tokens,) = re.findall(r"KV cache size: ([\d,]+) tokens", engine.log)
    return tokens


def drawn(folder: Path, shape: dict[str, Any]) -> Path:
    """A folder that vLLM loads as a model of this shape, whose weights it draws (``load_format="dummy"``)."""
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def store(engine: Engine, *documents: list[int]) -> None:
    """Have an engine store documents, of which vLLM's own cache keeps nothing."""
    for document in documents:
        engine.one(document)
    engine.forget()


BEFORE = 40
"""The tokens of a blended prompt before its first document."""


def blended_prompt(engine: Engine, texts: Texts) -> list[int]:
    """A prompt that moves two documents, which are stored."""
    first, second = texts.new(250), texts.new(250)
    store(engine, [*first, *second])
    return [*texts.new(BEFORE), *second, *texts.new(20), *first, *texts.new(30)]


class MovingPrompt:
    """A prompt that moves two documents, and the one that had them before."""

    def __init__(self, texts: Texts, n: int = 250) -> None:
        first, second = texts.new(n), texts.new(n)
        self.before = [*first, *second, *texts.new(40)]
        self.moving = [*texts.new(40), *second, *texts.new(20), *first, *texts.new(30)]

    def kv(self, answer: Answer) -> KV:
        return answer.kv(len(self.moving) - 1)


def moved(engine: Engine, prompts: MovingPrompt) -> Answer:
    """The answer to a prompt that is moved as it was stored."""
    return engine.one(prompts.moving, recompute_ratio=0.0, store=False)


def from_the_arena(engine: Engine, prompts: MovingPrompt) -> KV:
    """The KV of a prompt when vLLM has none of its donors, as after this."""
    engine.one(prompts.before)
    engine.forget()
    answer = moved(engine, prompts)
    assert answer.report["moved_tokens"] >= 500 and answer.report["copied_tokens"] == 0
    kv = prompts.kv(answer)
    engine.forget()
    return kv


def exactly(answer: Answer, plain: Engine, prompt: list[int]) -> bool:
    """Whether the KV of a prompt and its answer is what the model alone computes."""
    said = [*prompt, *answer.tokens]
    n = len(said) - 1
    return largest_difference(answer.kv(n), plain.one(said).kv(n)) < ROUNDING


def check_recomputation(engine: Engine, texts: Texts, n: int, rounding: float = ROUNDING) -> None:
    """Two documents of ``n`` tokens in another order, all recomputed, repaired, or repaired for a token in doubt, have
    the KV of a full prefill."""
    first, second = texts.new(n), texts.new(n)
    store(engine, [*first, *second])
    prompt = [*second, *texts.new(5), *first, *texts.new(9)]
    expected = engine.full_prefill(prompt)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 2 * n
    assert largest_difference(blended.kv(len(prompt) - 1), expected) < rounding
    engine.forget()
    # A selector that probes or asks before it picks has other forwards.
    half = engine.one(prompt, recompute_ratio=0.5, store=False)
    assert half.report["recomputed_tokens"] == n
    # In the first layer keys and values depend on the token and its position alone.
    assert largest_difference(half.kv(len(prompt) - 1)[0], expected[0]) < rounding
    engine.forget()
    repaired = engine.one(prompt, tokens=2, recompute_ratio=0.0, repair="always", store=False)
    assert largest_difference(repaired.kv(len(prompt) - 1), expected) < rounding
    engine.forget()
    held = engine.one(prompt, tokens=4, recompute_ratio=0.0, doubt=1e6, store=False)
    assert held.report["doubt"]["token"] == 1 and largest_difference(held.kv(len(prompt) - 1), expected) < rounding
    engine.forget()


@pytest.fixture
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(sum(request.node.name.encode()))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Engine]:
    """vLLM without BlendHub."""
    with Engine(model) as engine:
        yield engine


@pytest.fixture
def engine() -> Iterator[Any]:
    """The scheduler side of an engine whose vLLM is played; files with real engines have another of this name."""
    from tests.vllm.played_engine import played_engine

    with played_engine() as engine:
        yield engine
