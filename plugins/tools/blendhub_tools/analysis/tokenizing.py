"""Prompts as token ids, by a tokenizer and its chat template or a token a byte; how much KV a token takes."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.limits import MAX_PROMPT_TOKENS
from blendhub_tools.analysis.formats import Prompt
from blendhub_tools.analysis.lines import BrokenLine

NUMBER_BYTES = 2
"""vLLM computes in 16 bits, also with weights that are stored in 32."""

Encoded: TypeAlias = Tokens | BrokenLine
Encoder: TypeAlias = Callable[[Sequence[Prompt]], list[Encoded]]
"""Makes token ids of prompts with text or messages, or says why one has none."""


def encode(prompts: Sequence[Prompt], encoder: Encoder) -> list[Encoded]:
    """The tokens of each prompt, or the reason why it has none. Prompts that are token ids need no encoder."""
    texts = [prompt for prompt in prompts if prompt.ids is None]
    encoded = iter(encoder(texts) if texts else [])
    return [_checked(next(encoded) if prompt.ids is None else prompt.ids) for prompt in prompts]


def _checked(tokens: Encoded) -> Encoded:
    if isinstance(tokens, BrokenLine):
        return tokens
    if not tokens.size:
        return BrokenLine("is empty")
    if tokens.size > MAX_PROMPT_TOKENS:
        return BrokenLine(f"has more than {MAX_PROMPT_TOKENS:,} tokens, which hubs refuse (max_prompt_tokens)")
    return tokens


def refuse(prompts: Sequence[Prompt]) -> list[Encoded]:
    """The encoder for logs of token ids."""
    raise InvalidInput(
        f"{prompts[0].place} is text: name the model's tokenizer, a path or a Hugging Face name, with --tokenizer, "
        "or count each byte as a token with --bytes"
    )


def as_bytes(prompts: Sequence[Prompt]) -> list[Encoded]:
    """A token a byte. Shares are close to a real tokenizer's, whose tokens have about four bytes."""
    texts = (
        "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in prompt.messages or ())
        if prompt.text is None
        else prompt.text
        for prompt in prompts
    )
    return [as_tokens(np.frombuffer(text.encode(), np.uint8).astype(np.uint32)) for text in texts]


class Pretrained:
    """An encoder that ``transformers`` loads, with its chat template or another one."""

    def __init__(self, name: str, template: str | None = None) -> None:
        self._name = name
        transformers = _transformers()
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BlendHubError(
                f"--tokenizer {name}: transformers cannot load it: {first}; give a folder with tokenizer.json, a "
                "Hugging Face name, or --bytes"
            ) from None
        if template is not None:
            self._tokenizer.chat_template = template

    def __call__(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        texts = [self._rendered(prompt) if prompt.text is None else prompt.text for prompt in prompts]
        encoded: list[Encoded] = [text if isinstance(text, BrokenLine) else BrokenLine("is empty") for text in texts]
        # Templates write the special tokens themselves, as vLLM knows.
        for special in (True, False):
            batch = {
                at: text
                for at, text in enumerate(texts)
                if isinstance(text, str) and (prompts[at].text is not None) is special
            }
            if batch:
                ids = self._tokenizer(list(batch.values()), add_special_tokens=special, return_attention_mask=False)
                for at, tokens in zip(batch, ids["input_ids"], strict=True):
                    encoded[at] = as_tokens(np.array(tokens, np.uint32))
        return encoded

    def kv_bytes(self) -> int | None:
        """The KV of a token of the tokenizer's model; None if that is not known."""
        with contextlib.suppress(Exception):
            from transformers.utils.hub import cached_file

            return kv_bytes_of(str(cached_file(self._name, "config.json")))
        return None

    def _rendered(self, prompt: Prompt) -> str | BrokenLine:
        if not self._tokenizer.chat_template:
            raise InvalidInput(
                f"{prompt.place} is a chat, and --tokenizer {self._name} has no chat template: name a file with one, "
                "--chat-template FILE"
            )
        messages = [_as_vllm(message) for message in prompt.messages or ()]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=prompt.tools, tokenize=False, add_generation_prompt=True
                )
            )
        except ImportError as error:
            raise BlendHubError(f"{error}; pip install 'blendhub[tools]'") from None
        except Exception as error:
            return BrokenLine(f"the chat template refuses it: {str(error) or type(error).__name__}")


def _as_vllm(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to a template: arguments of tools are objects there, and text in requests."""
    try:
        calls = [
            {**call, "function": {**call["function"], "arguments": msgspec.json.decode(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    except (KeyError, TypeError, msgspec.DecodeError):
        return message
    return {**message, "tool_calls": calls}


def _transformers() -> Any:
    # It would say that no model can be used without torch, and that prompts are long.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import transformers
    except ImportError:
        raise BlendHubError(
            "--tokenizer needs transformers: pip install 'blendhub[tools]', or count bytes with --bytes"
        ) from None
    return transformers


def kv_bytes_of(config: str | Path) -> int | None:
    """Bytes of KV a token on all ranks together, by a model's config.json; None if the file does not say."""
    try:
        shape = msgspec.json.decode(Path(config).read_bytes(), type=dict[str, Any])
        shape = shape.get("text_config") or shape
        layers = int(shape["num_hidden_layers"])
        if shape.get("kv_lora_rank"):
            # A joint latent of keys and values, and the keys' rotary part.
            return layers * NUMBER_BYTES * (int(shape["kv_lora_rank"]) + int(shape["qk_rope_head_dim"]))
        heads = int(shape["num_attention_heads"])
        kv_heads = int(shape.get("num_key_value_heads") or heads)
        width = int(shape.get("head_dim") or shape["hidden_size"] // heads)
        return 2 * layers * kv_heads * width * NUMBER_BYTES
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None
