"""Prompts as token ids, by a tokenizer and its chat template or a token a byte; how much KV a token takes."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.limits import MOST_PROMPT_TOKENS
from blendhub_tools.analysis.formats import Prompt
from blendhub_tools.analysis.lines import BrokenLine

USUAL = 128 * 1024
"""The size for an unnamed model: 32 layers, 8 KV heads of 128, keys and values, 2 bytes each."""

NUMBER = 2
"""The bytes of one number: vLLM computes in 16 bits, also with weights that are stored in 32."""


def kv_bytes_of(config: str | Path) -> int | None:
    """Bytes a token on all ranks together; None if the file does not say."""
    try:
        given = msgspec.json.decode(Path(config).read_bytes(), type=dict[str, Any])
        return _kv_bytes(given.get("text_config") or given)
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def _kv_bytes(config: dict[str, Any]) -> int:
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        # A joint latent of keys and values, and the keys' rotary part.
        return layers * NUMBER * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * layers * kv_heads * width * NUMBER


Encoded = Tokens | BrokenLine


class Encoder(ABC):
    """Makes token ids of prompts. Those that are token ids already stay as they are."""

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        """The tokens of each prompt, or the reason why it has none."""
        texts = [prompt for prompt in prompts if prompt.ids is None]
        encoded = iter(self.encode_texts(texts) if texts else [])
        found = [prompt.ids if prompt.ids is not None else next(encoded) for prompt in prompts]
        return [one if isinstance(one, BrokenLine) else _checked(one) for one in found]

    @abstractmethod
    def encode_texts(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        """The tokens of each prompt with text or messages, or the reason why it has none."""

    def kv_bytes(self) -> int | None:
        """The KV of a token of the tokenizer's model; None if that is not known."""
        return None


def _checked(tokens: Tokens) -> Encoded:
    if not tokens.size:
        return BrokenLine("is empty")
    if tokens.size > MOST_PROMPT_TOKENS:
        return BrokenLine(f"has more than {MOST_PROMPT_TOKENS:,} tokens, which hubs refuse (max_prompt_tokens)")
    return tokens


class IdsOnly(Encoder):
    """The encoder for logs of token ids."""

    def encode_texts(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        raise InvalidInput(
            f"{prompts[0].place} is text: name the model's tokenizer, a path or a Hugging Face name, with --tokenizer, "
            "or count each byte as a token with --bytes"
        )


class ByteEncoder(Encoder):
    """An encoder with one token a byte. Shares are close to a real tokenizer's, whose tokens have about four bytes."""

    def encode_texts(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        return [as_tokens(np.frombuffer(_plain(prompt).encode(), np.uint8).astype(np.uint32)) for prompt in prompts]


def _plain(prompt: Prompt) -> str:
    """Text as it is, and messages in a common format of chat."""
    if prompt.text is not None:
        return prompt.text
    return "".join(f"<|{one['role']}|>\n{one['content']}\n" for one in prompt.messages or ())


class Pretrained(Encoder):
    """A tokenizer that ``transformers`` loads, with its chat template or another one."""

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

    def encode_texts(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        encoded: list[Encoded] = [BrokenLine("is empty")] * len(prompts)
        # Templates write the special tokens themselves, as vLLM knows.
        for special in (True, False):
            texts: dict[int, str] = {}
            for at, prompt in enumerate(prompts):
                if (prompt.text is not None) is special:
                    try:
                        texts[at] = prompt.text if prompt.text is not None else self._rendered(prompt)
                    except BrokenLine as error:
                        encoded[at] = error
            if texts:
                ids = self._tokenizer(list(texts.values()), add_special_tokens=special, return_attention_mask=False)
                for at, one in zip(texts, ids["input_ids"], strict=True):
                    encoded[at] = as_tokens(np.array(one, np.uint32))
        return encoded

    def kv_bytes(self) -> int | None:
        with contextlib.suppress(Exception):
            from transformers.utils.hub import cached_file

            return kv_bytes_of(str(cached_file(self._name, "config.json")))
        return None

    def _rendered(self, prompt: Prompt) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidInput(
                f"{prompt.place} is a chat, and --tokenizer {self._name} has no chat template: name a file with one, "
                "--chat-template FILE"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_as_vllm(message) for message in prompt.messages or ()],
                    tools=prompt.tools,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except ImportError as error:
            raise BlendHubError(f"{error}; pip install 'blendhub[tools]'") from None
        except Exception as error:
            raise BrokenLine(f"the chat template refuses it: {str(error) or type(error).__name__}") from None


def _as_vllm(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to a template: arguments of tools are objects there, and text in requests."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"])}}
    except (KeyError, TypeError, msgspec.DecodeError):
        return call


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
