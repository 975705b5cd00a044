"""A tokenizer whose tokens are words: vLLM's server and its client load it with a model."""

import json
from collections.abc import Sequence
from pathlib import Path


def numbered(vocabulary: int) -> list[str]:
    """Words that name their numbers; the first ones are special."""
    return ["<unk>", "</s>", *(f"w{n}" for n in range(2, vocabulary))]


def add_tokenizer(folder: Path, words: Sequence[str], **about: object) -> None:
    """Write it into the folder of a model. ``about`` goes into its configuration."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [{"id": n, "content": word, "special": True} | plain for n, word in enumerate(words) if word[0] == "<"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(made))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | about))
