"""The rule in chunks is the rule token by token, and a document that stays where it was loses nothing."""

import random

import pytest
import torch
import torch.nn.functional as F

from research.hybrid.model import Inputs, Model, Piece, gated_delta, map_of
from research.hybrid.moving import Copy, as_batch, moved
from research.hybrid.task import LEVELS, WORDS, prompt


def some_inputs(tokens: int) -> Inputs:
    q, k, v = torch.randn(3, 2, 5, tokens, 32)
    return Inputs(
        F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -0.1 * torch.rand(2, 5, tokens), torch.rand(2, 5, tokens)
    )


def one_by_one(x: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    said = []
    for t in range(x.q.shape[2]):
        q, k, v = (each[:, :, t, :, None] for each in x[:3])
        state = x.decay[:, :, t, None, None].exp() * state
        state = state + x.beta[:, :, t, None, None] * k @ (v.mT - k.mT @ state)
        said.append(q.mT @ state)
    return torch.cat(said, 2), state


def test_chunks_are_the_rule_and_a_map_is_what_they_do_to_any_state():
    torch.manual_seed(0)
    inputs, state = some_inputs(83), torch.randn(2, 5, 32, 32)
    said, end = one_by_one(inputs, state)
    for ours, wanted in zip(gated_delta(inputs, state), (said, end), strict=True):
        torch.testing.assert_close(ours, wanted)
    made = map_of(inputs, torch.zeros(0))
    torch.testing.assert_close(made.a @ state + made.b, end)


@torch.no_grad()
@pytest.mark.parametrize("seam", [0, 16, 32])
def test_documents_that_stay_in_place_give_the_logits_of_a_full_prefill(seam: int):
    torch.manual_seed(0)
    model = Model(WORDS)
    for block in model.blocks:
        torch.nn.init.normal_(block.down.weight, std=0.05)
        torch.nn.init.normal_(block.mixer.out.weight, std=0.05)
    asked = prompt(random.Random(0), LEVELS[-1], 4)
    before, copies = asked.system, []
    for document in asked.documents:
        copies.append(Copy.computed(model, before, document.tokens))
        before = [*before, *document.tokens]
    question = asked.questions[0].tokens
    full, _ = model(Piece(as_batch([*before, *question])))
    ours, _ = model(*moved(asked.system, copies, seam), Piece(as_batch(question)))
    torch.testing.assert_close(ours, full[:, -len(question) :], atol=1e-4, rtol=1e-4)
