"""Devices with one fault each in their attention, and the test that must catch it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blendhub.contracts import (
    AttentionRules,
    ChosenAttention,
    ChosenTokens,
)
from blendhub.core.errors import Unsupported
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.testing.device_reference import (
    ReferenceDevice,
)
from tests.faulty_copies import as_if_contiguous


class AttendingDevice(ReferenceDevice):
    """A correct device with attention."""

    attends: type[ReferenceAttention] = ReferenceAttention

    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype) -> ChosenAttention:
        if self._others:
            raise Unsupported("there are several groups")
        assert self._layers is not None
        return self.attends(self._layers, self._block_size, self._layout, rules)


class AttendsToTheFirstGroup(AttendingDevice):
    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype) -> ChosenAttention:
        self._others = []
        return super().attention(rules, dtype)


def ignoring(**rules: Any) -> type[AttendingDevice]:
    """A device that takes these rules for those of all layers."""

    class Ignoring(ReferenceAttention):
        def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
            self._rules = [one._replace(**rules) for one in self._rules]
            super().attend(layer, queries, output)

    return type(f"Ignores_{'_'.join(rules)}", (AttendingDevice,), {"attends": Ignoring})


class SeesTheFuture(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(positions=np.full_like(tokens.positions, tokens.positions.max())))


class ExpectsAscendingTokens(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(positions=np.sort(tokens.positions)))


class KnowsOnePrompt(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(blocks=np.repeat(tokens.blocks[:1], len(tokens.blocks), 0)))


class ReadsTheNextBlock(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(blocks=np.roll(tokens.blocks, 1, axis=1)))


class KeepsTheBlocksOfTheFirstForward(ReferenceAttention):
    _tokens: Any = None

    def begin(self, tokens: ChosenTokens) -> None:
        first = self._tokens.blocks if self._tokens else tokens.blocks
        super().begin(tokens._replace(blocks=first))


class AnswersForTheFirstLayer(ReferenceAttention):
    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        super().attend(0, queries, output)


class SharesKeysInTurn(ReferenceAttention):
    """A head of keys serves every n-th head of queries instead of neighbours."""

    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        heads = torch.arange(queries.shape[1]).view(-1, self._planes[layer][0].shape[1]).T.flatten()
        answers = torch.empty_like(output)
        super().attend(layer, queries[:, heads], answers)
        output[:, heads] = answers


class ExpectsContiguousQueries(ReferenceAttention):
    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        super().attend(layer, as_if_contiguous(queries), output)


class WritesContiguousAnswers(ReferenceAttention):
    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        super().attend(layer, queries, as_if_contiguous(output))


def attending(attends: type[ReferenceAttention]) -> type[AttendingDevice]:
    return type(attends.__name__, (AttendingDevice,), {"attends": attends})


FAULTS = [
    (AttendsToTheFirstGroup, "test_attention_over_several_groups_is_refused"),
    (attending(SeesTheFuture), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(ExpectsAscendingTokens), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(KnowsOnePrompt), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(ReadsTheNextBlock), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (
        attending(KeepsTheBlocksOfTheFirstForward),
        "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position",
    ),
    (attending(ExpectsContiguousQueries), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(WritesContiguousAnswers), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(SharesKeysInTurn), "test_each_layer_has_its_rules"),
    (attending(AnswersForTheFirstLayer), "test_each_layer_has_its_rules"),
    (ignoring(scale=0.2), "test_each_layer_has_its_rules"),
    (ignoring(window=None), "test_each_layer_has_its_rules"),
    (ignoring(chunk=None), "test_each_layer_has_its_rules"),
    (ignoring(soft_cap=0.0), "test_each_layer_has_its_rules"),
    (ignoring(sinks=None), "test_each_layer_has_its_rules"),
    (ignoring(latent=0), "test_pages_of_every_format"),
    (ignoring(key_scale=1.0), "test_keys_and_values_of_8_bits_have_scales"),
    (ignoring(value_scale=1.0), "test_keys_and_values_of_8_bits_have_scales"),
]
