"""Options of matchers that are written as text: the engine turns them into token ids, as the hub has no tokenizer."""

from collections.abc import Sequence
from itertools import combinations

from vllm.config import ModelConfig
from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config

from blendhub.core.errors import OptionError
from blendhub.framework.host import PluginHost
from blendhub.vllm.settings import Settings, replace_texts

BEFORE = ("", "word", "End.", "7", ")", "\n", "字")
BEHIND = ("", "word", "The", "7", "(", "\n", "字")
"""Texts around the written one: tokenizers join characters across its borders."""


def with_token_ids(settings: Settings, host: PluginHost, model: ModelConfig) -> Settings:
    """The settings, with token ids in place of texts; raises OptionError for a text that has no ids of its own."""

    def ids_of(key: str, text: str) -> list[int]:
        if model.skip_tokenizer_init:
            raise OptionError(f"{key} is text, and this engine runs without a tokenizer; write token ids")
        return token_ids(key, text, cached_tokenizer_from_config(model))

    return replace_texts(settings, host, ids_of)


def token_ids(key: str, text: str, tokenizer: TokenizerLike) -> list[int]:
    """The longest ids of the text that stand wherever it does; only white space at its ends may be left out.

    So the ids are found both in prompts that are tokenized whole, and in those that are put together from the ids of
    parts, in which the text keeps tokens of its own.
    """
    alone = tokenizer.encode(text, add_special_tokens=False)
    samples = [f"{before}{text}{behind}" for before in BEFORE for behind in BEHIND]
    prompts = [tokenizer.encode(sample, add_special_tokens=False) for sample in samples]
    for start, end in sorted(combinations(range(len(alone) + 1), 2), key=lambda ends: ends[0] - ends[1]):
        ids = alone[start:end]
        if tokenizer.decode(ids).strip() == text.strip() and all(_holds(prompt, ids) for prompt in prompts):
            return ids
    sample = next((sample for sample, ids in zip(samples, prompts, strict=True) if not _holds(ids, alone)), text)
    raise OptionError(
        f"{key} = {text!r} has the tokens {alone} by itself, but others within {sample!r}, so it would not be found in "
        "prompts; write another text, such as a special token of the model, or the token ids that your prompts have"
    )


def _holds(prompt: Sequence[int], ids: Sequence[int]) -> bool:
    return any(list(prompt[at : at + len(ids)]) == list(ids) for at in range(len(prompt) - len(ids) + 1))
