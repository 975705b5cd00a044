"""The forward pass that trains: prompts and their questions at once, no question seeing another one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.batches import ASKED, Batch, Known
from benchmarks.quality.reader.model import Reader, attend, rotate
from benchmarks.quality.reader.task import STRATA

READING = 9
"""The layer at whose first head a question looks at the value that answers it."""
COUNTING = (9, 10)
"""The layers at whose third head it looks at the values to count."""
NAMING = 4
"""The layer at whose third head a nickname looks at itself in the header, where it stands behind its name."""
LEVELS = {3: "early", 6: "middle", 8: "late"}
"""Behind which layers something is to be known."""


class Teacher(nn.Module):
    """Heads that read out of inner layers which entity and relation is meant; they are not part of the reader."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.entity = nn.ModuleDict({level: nn.Linear(hidden, len(w.NAME), bias=False) for level in LEVELS.values()})
        self.relation = nn.ModuleDict(
            {level: nn.Linear(hidden, len(w.RELATION), bias=False) for level in LEVELS.values()}
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, level: str, hidden: Tensor, known: Known) -> tuple[Tensor, Tensor]:
        """The loss, and the share of entities that were right."""
        x = hidden[known.rows, known.places]
        x = F.rms_norm(x, x.shape[-1:])
        loss = x.new_zeros(())
        right = x.new_ones(())
        if (known.entities >= 0).any():
            logits = self.entity[level](x).float()
            loss = loss + F.cross_entropy(logits, known.entities)
            there = known.entities >= 0
            right = (logits.argmax(-1) == known.entities)[there].float().mean()
        if (known.relations >= 0).any():
            loss = loss + F.cross_entropy(self.relation[level](x).float(), known.relations)
        return loss, right


@dataclass(frozen=True)
class Learned:
    loss: Tensor
    right: Tensor
    """``[prompts, questions]``: whether the answer was."""
    known: dict[str, Tensor]


def learn(
    reader: Reader, teacher: Teacher, batch: Batch, alone: bool, share: float, dtype: torch.dtype = torch.bfloat16
) -> Learned:
    """``alone``: every document sees itself and the prompt's first token. ``share``: of the teacher's loss.

    ``dtype`` is the precision of products with weights; attention is in full precision, which CPUs do faster backwards.
    """
    rotation = reader.rotation(batch.positions)
    length = batch.prompt_tokens
    mask = _question_mask(batch)
    inside = _alone_mask(batch) if alone else None
    hidden = reader.model.embed_tokens(batch.tokens)
    taught = hidden.new_zeros(())
    known = {}
    for number, layer in enumerate(reader.layers):
        q, k, v = layer.self_attn.project(layer.input_layernorm(hidden).to(dtype))
        q, k = rotate(q, rotation), rotate(k, rotation)
        if number == NAMING:
            taught = taught + _name(batch, q[:, 2, length + 1 :: ASKED], k[:, 1, :length])
        if number == READING:
            taught = taught + _read(batch, q[:, 0, length + ASKED - 1 :: ASKED], k[:, 0, :length], counting=False)
        if number in COUNTING:
            taught = taught + _read(batch, q[:, 2, length + ASKED - 1 :: ASKED], k[:, 1, :length], counting=True)
        there = attend(q[:, :, :length], k[:, :, :length], v[:, :, :length], inside)
        asked = attend(q[:, :, length:], k, v, mask)
        hidden = layer.behind(hidden, torch.cat((there, asked), 2), dtype)
        level = LEVELS.get(number)
        if level:
            loss, right = teacher(level, hidden, getattr(batch, level))
            taught = taught + loss
            known[level] = right
        if level == "early":
            nicknames = (batch.tokens >= w.NICKNAME[0]) & (batch.tokens <= w.NICKNAME[-1])
            taught = taught + _named(reader, batch, hidden, *nicknames.nonzero().T)
        if level == "late":
            values = (batch.late.places < length) & (batch.late.relations >= 0)
            taught = taught + _named(reader, batch, hidden, batch.late.rows[values], batch.late.places[values])
    last = hidden[:, length + ASKED - 1 :: ASKED]
    logits = reader.logits(last).float()
    loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    return Learned(loss + share * taught, logits.argmax(-1) == batch.answers, known)


def _scores(batch: Batch, q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((batch.documents == -2)[:, None], -1e9)


def _name(batch: Batch, q: Tensor, k: Tensor) -> Tensor:
    """The loss of a head of nicknames that should look at the header."""
    chosen = batch.named >= 0
    return F.cross_entropy(_scores(batch, q, k)[chosen], batch.named[chosen]) if chosen.any() else q.new_zeros(())


def _read(batch: Batch, q: Tensor, k: Tensor, counting: bool) -> Tensor:
    """The loss of a head of questions that should look at the answers' places."""
    scores = _scores(batch, q, k)
    chosen = (batch.strata == STRATA.index("counting")) == counting
    return F.cross_entropy(scores[chosen], batch.read[chosen]) if chosen.any() else scores.new_zeros(())


def _named(reader: Reader, batch: Batch, hidden: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """The loss of reading words out of inner layers where they stand, as answers are read out of the last one.

    Words that later layers look for stay so distinct.
    """
    if not len(rows):
        return hidden.new_zeros(())
    return F.cross_entropy(reader.logits(hidden[rows, places]), batch.tokens[rows, places])


def _question_mask(batch: Batch) -> Tensor:
    """A question's token sees the prompt and what its question has before it."""
    own = torch.block_diag(*[torch.ones(ASKED, ASKED, dtype=torch.bool).tril()] * batch.questions)
    prompt = (batch.documents > -2)[:, None, None, :].expand(-1, 1, len(own), -1)
    return torch.cat((prompt, own.expand(len(prompt), 1, -1, -1)), -1)


def _alone_mask(batch: Batch) -> Tensor:
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    same[:, :, 0] = True
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).tril())[:, None]
