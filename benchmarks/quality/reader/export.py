"""The reader as a Hugging Face checkpoint that vLLM serves: Qwen3, with a tokenizer of whole words."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.model import EPS, Reader, Sizes

LONGEST = 2304


def load(folder: Path = CHECKPOINT) -> Reader:
    """A reader with the weights of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    reader = Reader(
        Sizes(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            width=config["head_dim"],
            inner=config["intermediate_size"],
            theta=config["rope_theta"],
        )
    )
    weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    reader.load_state_dict(weights)
    return reader.eval()


def export(reader: Reader, folder: Path, dtype: torch.dtype) -> None:
    """Write weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(dtype).contiguous() for name, weight in reader.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(reader.sizes))
    tokenizer().save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": LONGEST,
            "pad_token": w.WORDS[w.PAD],
            "bos_token": w.WORDS[w.BOS],
            "eos_token": w.WORDS[w.EOS],
            "clean_up_tokenization_spaces": False,
        },
    )


def tokenizer() -> Tokenizer:
    """Each word between blanks is a token."""
    made = Tokenizer(models.WordLevel(w.TOKENS, unk_token=w.WORDS[w.PAD]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(w.WORDS[token], special=True) for token in (w.PAD, w.BOS, w.EOS)])
    return made


def _config(sizes: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.width,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": EPS,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "pad_token_id": w.PAD,
        "bos_token_id": w.BOS,
        "eos_token_id": w.EOS,
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
