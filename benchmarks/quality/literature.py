"""Two rules of the literature, computed in torch: a forward of vLLM cannot stop at a layer and go on with fewer tokens,
and shows no selector what a question attends to.

- ``gradual``: CacheBlend's filtering. All tokens are computed in the first layer; behind each of the next ones, those
  whose keys and values deviate most from what is stored stay, until the ratio is reached. What was computed of the
  others is kept.
- ``asked``: the tokens that the question attends to most, over stored KV, in two layers of middle depth.

Both answer the cases that vLLM answers, from KV of the same earlier prompts. They have no times.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np
import torch
from blendhub_selectors.windows import Mask, Windows
from torch import Tensor

from benchmarks.quality.measure import Steps
from benchmarks.quality.outcomes import Outcome
from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.evaluate import KV, answers, blended, compute, placed
from benchmarks.quality.reader.model import Reader, attend, rotate
from benchmarks.quality.reader.task import Prompt
from benchmarks.quality.workload import Case, Question, Tokens

NAMES = ("gradual", "asked")
FILTERS = 4
"""Layers behind which tokens are left out."""
WINDOW_TOKENS = 4
"""A token that is attended to is computed with what follows it, as by the selectors that ship."""


class Literature:
    """The cases, and the KV of their documents as it was computed in earlier prompts."""

    def __init__(self, reader: Reader, prompts: Sequence[Prompt], cases: Sequence[Case], visits: Sequence[Tokens]):
        self._reader = reader
        self._cases = list(zip(prompts, cases, strict=True))
        self._known: dict[tuple[int, ...], KV] = {}
        for visit in visits:
            self._known |= _documents(reader, visit)

    @torch.inference_mode()
    def outcomes(self, ratios: Sequence[float], steps: Steps) -> Iterator[Outcome]:
        for name in NAMES:
            for ratio in ratios:
                outcome = Outcome(name, "", ratio)
                for prompt, case in steps(self._cases, f"{name} at {ratio:g}, in torch"):
                    self._measure(outcome, prompt, case)
                yield outcome

    def _measure(self, outcome: Outcome, prompt: Prompt, case: Case) -> None:
        kv = [self._known[tuple(document)] for document in prompt.documents]
        if outcome.selector == "gradual":
            filtered, computed = gradual(self._reader, prompt, placed(prompt, kv), outcome.ratio)
            given = answers(self._reader, filtered, [question.tokens for question in case.questions])
        else:
            stale, computed = blended(self._reader, prompt, kv, [set() for _ in kv]), outcome.ratio
            given = [self._asked(prompt, kv, stale, question, outcome.ratio) for question in case.questions]
        outcome.note(
            [question.score([answer]) for question, answer in zip(case.questions, given, strict=True)], computed
        )

    def _asked(self, prompt: Prompt, kv: Sequence[KV], stale: KV, question: Question, ratio: float) -> int:
        begin = len(prompt.header)
        anew = []
        chosen = attended(self._reader, stale, question.tokens, begin, ratio)
        for document in prompt.documents:
            anew.append(set(np.flatnonzero(chosen[begin : begin + len(document)]).tolist()))
            begin += len(document)
        return answers(self._reader, blended(self._reader, prompt, kv, anew), [question.tokens])[0]


def gradual(reader: Reader, prompt: Prompt, reused: KV, ratio: float) -> tuple[KV, float]:
    """The prompt's KV, and the share of the documents' KV that was computed."""
    tokens = torch.tensor([*prompt.header, *(token for one in prompt.documents for token in one)])
    header, moved = len(prompt.header), len(tokens) - len(prompt.header)
    everywhere = reader.rotation(torch.arange(len(tokens))[None])
    keys, values = reused.keys.clone(), reused.values.clone()
    places, computed = torch.arange(len(tokens)), 0
    hidden = reader.model.embed_tokens(tokens)[None]
    for number, layer in enumerate(reader.layers):
        q, k, v = layer.self_attn.project(layer.input_layernorm(hidden))
        if 1 <= number <= FILTERS:
            deviation = _deviation(k[0], keys[number][:, places]) + _deviation(v[0], values[number][:, places])
            deviation[:header] = torch.inf
            most = header + ceil(ratio ** (number / FILTERS) * moved)
            kept = deviation.topk(min(most, len(places))).indices.sort().values
        else:
            kept = torch.arange(len(places))
        keys[number][:, places], values[number][:, places] = k[0], v[0]
        places, q, hidden = places[kept], q[:, :, kept], hidden[:, kept]
        mask = torch.arange(len(tokens)) <= places[:, None]
        here = (everywhere[0][:, :, places], everywhere[1][:, :, places])
        seen = attend(rotate(q, here), rotate(keys[number][None], everywhere), values[number][None], mask)
        hidden = layer.behind(hidden, seen)
        computed += len(places) - header
    return KV(keys, values), computed / (moved * len(reader.layers))


def attended(reader: Reader, kv: KV, question: Tokens, begin: int, ratio: float) -> Mask:
    """The tokens from ``begin`` on that the question attends to most, each with what follows it."""
    length = kv.keys.shape[2]
    everywhere = torch.arange(length + len(question))
    rotation, here = reader.rotation(everywhere[None]), reader.rotation(everywhere[None, length:])
    mask = everywhere <= everywhere[length:, None]
    middle = len(reader.layers) // 2
    weights = torch.zeros(length)
    hidden = reader.model.embed_tokens(torch.tensor(question))[None]
    for number, layer in enumerate(reader.layers):
        q, k, v = layer.self_attn.project(layer.input_layernorm(hidden))
        q, k = rotate(q, here), rotate(torch.cat((kv.keys[number][None], k), 2), rotation)
        if number in (middle - 1, middle):
            heads = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = (q @ heads.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
            weights += scores.softmax(-1)[..., :length].sum((0, 1, 2))
        hidden = layer.behind(hidden, attend(q, k, torch.cat((kv.values[number][None], v), 2), mask))
    moved, chosen = np.zeros(length, bool), np.zeros(length, bool)
    moved[begin:] = True
    best = begin + np.argsort(-weights[begin:].numpy(), kind="stable")
    for span in Windows.at(best, WINDOW_TOKENS, length).within(ceil(ratio * int(moved.sum())), moved):
        chosen[span.start : span.end] = True
    return chosen


def _documents(reader: Reader, visit: Tokens) -> dict[tuple[int, ...], KV]:
    """The documents of an earlier prompt, with the KV that they had there."""
    with torch.inference_mode():
        kv = compute(reader, visit)
    begins = [place for place, token in enumerate(visit) if token == w.DOCUMENT]
    return {
        tuple(visit[begin:end]): KV(kv.keys[:, :, begin:end].clone(), kv.values[:, :, begin:end].clone())
        for begin, end in zip(begins, [*begins[1:], len(visit)], strict=True)
    }


def _deviation(fresh: Tensor, stored: Tensor) -> Tensor:
    return (fresh - stored).square().sum((0, 2))
