"""Attention of chosen tokens over the keys of their prompt, in plain torch: the reference for all other ways.

It does not matter in which order tokens and keys are given. Keys and values are as the model computed them, so scales
mean nothing here. Computed in float32. Nothing waits for the device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from blendhub.contracts import AttentionRules

LOWEST, TINY = torch.finfo(torch.float32).min, torch.finfo(torch.float32).tiny
"""In place of minus infinity, and of 0, where a token sees no key: of these, differences and quotients are numbers."""
SLICE_BYTES = 2**26
"""The most memory for the products of queries and keys that are computed at a time."""


class Keys(NamedTuple):
    """Keys and values of one prompt in one layer."""

    positions: torch.Tensor
    """``[keys]``, int64."""
    keys: torch.Tensor
    """``[keys, heads, width]``"""
    values: torch.Tensor
    """``[keys, heads, width of a value]``"""


class Attended(NamedTuple):
    taken: torch.Tensor
    """What tokens take from values: float32 ``[tokens, heads, width of a value]``; 0 where a token sees no key."""
    log_sums: torch.Tensor
    """The logarithm of the sum of a token's weights before they are divided by it: float32 ``[tokens, heads]``; minus
    infinity where it sees no key."""


def attend(queries: torch.Tensor, positions: torch.Tensor, keys: Keys, rules: AttentionRules) -> Attended:
    """Tokens ``[n, heads, width]`` at these positions attend to the keys, of which there is one at least."""
    n, heads, _ = queries.shape
    width = keys.values.shape[-1]
    taken = queries.new_empty((n, heads, width), dtype=torch.float32)
    log_sums = queries.new_empty((n, heads), dtype=torch.float32)
    for rows, columns, served, products in _products(queries, positions, keys.positions, keys.keys, rules):
        highest = products.amax(-1).clamp_min(LOWEST)
        if rules.sinks is not None:
            sinks = rules.sinks[columns].float().view(len(products), 1, -1)
            highest = torch.maximum(highest, sinks)
        weights = (products - highest[..., None]).exp()
        sums = weights.sum(-1)
        if rules.sinks is not None:
            sums += (sinks - highest).exp()
        values = keys.values[:, served].float().transpose(0, 1)
        parts = (weights.flatten(1, 2) @ values).view(*weights.shape[:3], width) / sums.clamp_min(TINY)[..., None]
        taken[rows, columns] = parts.transpose(0, 1).flatten(1, 2)
        log_sums[rows, columns] = (highest + sums.log()).transpose(0, 1).flatten(1)
    return Attended(taken, log_sums)


def received(
    queries: torch.Tensor, positions: torch.Tensor, keys: Keys, rules: AttentionRules, log_sums: torch.Tensor
) -> torch.Tensor:
    """The weight of each key, summed over tokens and heads: float32 ``[keys]``.

    ``log_sums`` are those of all keys that the tokens attend to, of which these may be a part.
    """
    weights = torch.zeros(len(keys.positions), device=queries.device)
    for rows, columns, _, products in _products(queries, positions, keys.positions, keys.keys, rules):
        sums = log_sums[rows, columns].reshape(products.shape[1], len(products), -1).transpose(0, 1)
        weights += (products - sums.clamp_min(LOWEST)[..., None]).exp().sum((0, 1, 2))
    return weights


def _products(
    queries: torch.Tensor,
    positions: torch.Tensor,
    key_positions: torch.Tensor,
    keys: torch.Tensor,
    rules: AttentionRules,
) -> Iterator[tuple[slice, slice, slice, torch.Tensor]]:
    """Products ``[heads of keys, tokens, heads of queries for each, keys]`` of some tokens and heads at a time.

    With them the slices of tokens, of heads of queries and of heads of keys. Keys that a token does not see have minus
    infinity.
    """
    n, heads, width = queries.shape
    n_keys, n_heads = keys.shape[:2]
    group = heads // n_heads
    fitting = max(1, SLICE_BYTES // (4 * group * max(1, n_keys)))
    n_rows = min(n, fitting) or 1
    n_served = max(1, min(n_heads, fitting // n_rows))
    for row in range(0, n, n_rows):
        rows = slice(row, row + n_rows)
        hidden = ~_visible(positions[rows], key_positions, rules)
        for head in range(0, n_heads, n_served):
            served = slice(head, min(head + n_served, n_heads))
            columns = slice(served.start * group, served.stop * group)
            asked = queries[rows, columns].float().reshape(len(hidden), -1, group, width).transpose(0, 1)
            products = asked.flatten(1, 2) @ keys[:, served].float().permute(1, 2, 0) * rules.scale
            if rules.soft_cap:
                products = rules.soft_cap * torch.tanh(products / rules.soft_cap)
            products = products.view(len(asked), len(hidden), group, n_keys)
            yield rows, columns, served, products.masked_fill_(hidden[:, None], -torch.inf)


def _visible(positions: torch.Tensor, keys: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """Which keys each token attends to: ``[tokens, keys]``."""
    at = positions[:, None]
    visible = keys <= at
    if rules.window is not None:
        visible &= keys > at - rules.window
    if rules.chunk is not None:
        visible &= keys >= at // rules.chunk * rules.chunk
    return visible
