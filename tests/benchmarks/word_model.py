"""A tokenizer of words, which Hugging Face's classes load."""

import json
from pathlib import Path
from typing import Any

TEXT = "<unk> <s> </s> user model Anna lives live in Rome is Italy Where Why does . ? : Question Answer the of and"
WORDS = {word: number for number, word in enumerate(TEXT.split())}


def make_tokenizer(folder: Path, **more: Any) -> Path:
    """``more`` goes into its configuration."""
    special = [
        {"id": WORDS[word], "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for word in ("<unk>", "<s>", "</s>")
    ]  # fmt: skip
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    made = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
            "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [WORDS["<s>"]], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(made))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about | more))
    return folder
