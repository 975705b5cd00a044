"""A tokenizer of words, which Hugging Face's classes load, and which begins texts with a token."""

import json
from pathlib import Path
from typing import Any

from harness.engines.words import add_tokenizer

TEXT = "<unk> <s> </s> user model Anna lives live in Rome is Italy Where Why does . ? : Question Answer the of and"
WORDS = {word: number for number, word in enumerate(TEXT.split())}


def make_tokenizer(folder: Path, **more: Any) -> Path:
    """``more`` goes into its configuration."""
    add_tokenizer(folder, [*WORDS], bos_token="<s>", **more)
    file, sequence = folder / "tokenizer.json", {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [WORDS["<s>"]], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": processor}))
    return folder
