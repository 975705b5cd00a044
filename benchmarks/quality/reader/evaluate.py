"""How many answers of the reader are right, by stratum, when the KV of documents was computed in another context.

Keys are kept unrotated and rotated at the place where they are used, which is what a reuse that turns keys does.
"""

import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.model import Reader, attend, rotate
from benchmarks.quality.reader.task import STRATA, Prompt

Context = Literal["full", "alone", "foreign"]
Recompute = Callable[[Prompt], Sequence[Set[int]]]
"""For each document of a prompt the positions in it to compute anew."""


@dataclass(frozen=True)
class KV:
    """``[layers, kv heads, tokens, width]`` each; keys unrotated."""

    keys: Tensor
    values: Tensor


@torch.inference_mode()
def accuracy(
    reader: Reader, prompts: Sequence[Prompt], context: Context, recompute: Recompute | None = None, seed: int = 0
) -> dict[str, float]:
    """The share of right answers to all questions of each stratum.

    ``full``: the prompt is computed as a whole. ``alone``: each document was computed behind the prompt's first token;
    ``foreign``: behind the header and two documents of other prompts.
    """
    rng = random.Random(seed)
    asked, right = dict.fromkeys(STRATA, 0), dict.fromkeys(STRATA, 0)
    for prompt in prompts:
        kv = None if context == "full" else stored(reader, prompt, _donors(rng, prompt, prompts, context))
        anew = recompute(prompt) if recompute else [set[int]() for _ in prompt.documents]
        given = answers(reader, blended(reader, prompt, kv, anew), [one.tokens for one in prompt.questions])
        for question, answer in zip(prompt.questions, given, strict=True):
            asked[question.stratum] += 1
            right[question.stratum] += answer == question.answer
    return {stratum: right[stratum] / asked[stratum] for stratum in STRATA if asked[stratum]}


def _donors(rng: random.Random, prompt: Prompt, prompts: Sequence[Prompt], context: Context) -> list[list[int]]:
    """For each document the tokens that stood before it when it was computed."""
    if context == "alone":
        return [[w.BOS] for _ in prompt.documents]
    others = [one for one in prompts if one is not prompt]
    return [
        [*rng.choice(others).header, *(token for _ in range(2) for token in rng.choice(rng.choice(others).documents))]
        for _ in prompt.documents
    ]


def stored(reader: Reader, prompt: Prompt, before: Sequence[Sequence[int]]) -> list[KV]:
    """The KV of each document, computed behind other tokens."""
    found = []
    for document, others in zip(prompt.documents, before, strict=True):
        kv = compute(reader, [*others, *document])
        found.append(KV(kv.keys[:, :, len(others) :], kv.values[:, :, len(others) :]))
    return found


def blended(reader: Reader, prompt: Prompt, kv: Sequence[KV] | None, anew: Sequence[Set[int]]) -> KV:
    """The prompt's KV: the header and the tokens named are computed, other tokens of documents are as stored."""
    tokens = [*prompt.header, *(token for document in prompt.documents for token in document)]
    if kv is None:
        return compute(reader, tokens)
    fresh = [list(range(len(prompt.header)))]
    begin = len(prompt.header)
    for document, places in zip(prompt.documents, anew, strict=True):
        fresh.append(sorted(begin + place for place in places))
        begin += len(document)
    return compute(reader, tokens, placed(prompt, kv), [place for places in fresh for place in places])


def placed(prompt: Prompt, kv: Sequence[KV]) -> KV:
    """The KV of a prompt's documents where they stand in it; zeros for its header."""
    nothing = kv[0].keys[:, :, :0]
    padding = nothing.new_zeros(*nothing.shape[:2], len(prompt.header), nothing.shape[3])
    return KV(torch.cat([padding, *(one.keys for one in kv)], 2), torch.cat([padding, *(one.values for one in kv)], 2))


def compute(reader: Reader, tokens: Sequence[int], reused: KV | None = None, fresh: Sequence[int] | None = None) -> KV:
    """The KV of a prompt, of which only ``fresh`` positions are computed if others are ``reused``."""
    places = torch.arange(len(tokens)) if fresh is None else torch.tensor(fresh)
    everywhere = reader.rotation(torch.arange(len(tokens))[None])
    here = everywhere[0][:, :, places], everywhere[1][:, :, places]
    mask = None if fresh is None else torch.arange(len(tokens)) <= places[:, None]
    hidden = reader.model.embed_tokens(torch.tensor(tokens)[places])[None]
    keys, values = [], []
    for number, layer in enumerate(reader.layers):
        q, k, v = layer.self_attn.project(layer.input_layernorm(hidden))
        if reused is not None:
            k = reused.keys[number].index_copy(1, places, k[0])[None]
            v = reused.values[number].index_copy(1, places, v[0])[None]
        keys.append(k[0])
        values.append(v[0])
        hidden = layer.behind(hidden, attend(rotate(q, here), rotate(k, everywhere), v, mask))
    return KV(torch.stack(keys), torch.stack(values))


def answers(reader: Reader, kv: KV, questions: Sequence[Sequence[int]]) -> list[int]:
    """The reader's answer to each question, asked alone behind the prompt: no question sees another one."""
    tokens = torch.tensor(questions)
    number, asked = tokens.shape
    length = kv.keys.shape[2]
    before = reader.rotation(torch.arange(length)[None])
    here = reader.rotation(torch.arange(length, length + asked).repeat(number)[None])
    own = torch.block_diag(*[torch.ones(asked, asked, dtype=torch.bool).tril()] * number)
    mask = torch.cat((torch.ones(len(own), length, dtype=torch.bool), own), 1)
    hidden = reader.model.embed_tokens(tokens.flatten())[None]
    for layer, keys, values in zip(reader.layers, kv.keys, kv.values, strict=True):
        q, k, v = layer.self_attn.project(layer.input_layernorm(hidden))
        k = torch.cat((rotate(keys[None], before), rotate(k, here)), 2)
        hidden = layer.behind(hidden, attend(rotate(q, here), k, torch.cat((values[None], v), 2), mask))
    answered: list[int] = reader.logits(hidden[0, asked - 1 :: asked]).argmax(-1).tolist()
    return answered
