"""A separator may be written as text: its ids are those that it has wherever it stands."""

import pytest

from blendhub import PluginHost
from blendhub.core.errors import OptionError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.settings import Settings

pytest.importorskip("vllm", reason="needs vLLM; `make setup` installs it")

from vllm.config import ModelConfig

from blendhub.vllm.text_options import token_ids, with_token_ids
from tests.vllm.byte_pairs import byte_pairs

HOST = PluginHost.discover()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_pairs()


def test_a_text_that_melts_into_its_neighbours_is_refused(tokenizer):
    with pytest.raises(OptionError, match=r"key = .* has the tokens .* by itself, but others within"):
        token_ids("key", "7", tokenizer)


def test_a_matcher_gets_the_ids_of_the_model_s_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "opt", "architectures": ["OPTForCausalLM"]}')
    chosen = PluginChoice("prefix"), PluginChoice("separator", {"separator": " # # ", "min_match_tokens": 4})
    model = ModelConfig(str(tmp_path), tokenizer=str(tmp_path))
    plain, separator = with_token_ids(Settings(matchers=chosen), HOST, model).matchers
    assert plain == chosen[0] and separator.options["min_match_tokens"] == 4
    assert separator.options["separator"] == token_ids("key", " # # ", tokenizer)
    assert HOST.create("matcher", "separator", separator.options).reach == "segments"
