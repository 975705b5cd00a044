"""A tokenizer whose tokens are words, one for each number: vLLM's server and its client load it with a model."""

import json
from pathlib import Path

SPECIAL = ("<unk>", "</s>")


def add_tokenizer(model: Path, vocabulary: int) -> None:
    """Write it into the folder of a model."""
    words = {word: number for number, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(2, vocabulary))])}
    special = [
        {"id": number, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for number, word in enumerate(SPECIAL)
    ]  # fmt: skip
    made = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL[0]},
    }
    (model / "tokenizer.json").write_text(json.dumps(made))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (model / "tokenizer_config.json").write_text(json.dumps(about))
