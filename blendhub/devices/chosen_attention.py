"""Attention of chosen tokens over the keys of their prompt, in plain torch: the reference for all other ways.

It does not matter in which order tokens and keys are given.
"""

from typing import NamedTuple

import torch

from blendhub.contracts import AttentionRules

SLICE_BYTES = 2**26
"""The most memory for the weights that are computed at a time."""


class Keys(NamedTuple):
    """Keys and values of one prompt in one layer."""

    positions: torch.Tensor
    """``[keys]``, int64."""
    keys: torch.Tensor
    """``[keys, heads, width]``"""
    values: torch.Tensor
    """``[keys, heads, width of a value]``"""


def attend(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: Keys,
    rules: AttentionRules,
    received: torch.Tensor | None = None,
) -> torch.Tensor:
    """What tokens ``[n, heads, width]`` at these positions take from the values: ``[n, heads, width of a value]``.

    Keys and values are as the model computed them, so scales mean nothing here. ``received``: float32 ``[keys]``, to
    which the weight of each key is added, summed over tokens and heads. Computed in float32. Nothing waits for the
    device.
    """
    n, heads, width = queries.shape
    group = heads // keys.keys.shape[1]
    result = queries.new_empty((n, heads, keys.values.shape[-1]), dtype=torch.float32)
    step = max(1, SLICE_BYTES // (4 * group * max(1, len(keys.positions))))
    for number in range(keys.keys.shape[1]):
        heads_of_key = slice(number * group, (number + 1) * group)
        of_keys, of_values = keys.keys[:, number].float(), keys.values[:, number].float()
        sinks = None if rules.sinks is None else rules.sinks[heads_of_key].float()
        for start in range(0, n, step):
            rows = slice(start, start + step)
            products = queries[rows, heads_of_key].float().reshape(-1, width) @ of_keys.T * rules.scale
            hidden = ~_visible(positions[rows], keys.positions, rules)
            weights = _weights(products.view(-1, group, len(of_keys)), hidden[:, None], rules.soft_cap, sinks)
            result[rows, heads_of_key] = weights @ of_values
            if received is not None:
                received += weights.sum((0, 1))
    return result


def _visible(positions: torch.Tensor, keys: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """Which keys each token attends to: ``[tokens, keys]``."""
    at = positions[:, None]
    visible = keys <= at
    if rules.window is not None:
        visible &= keys > at - rules.window
    if rules.chunk is not None:
        visible &= keys >= at // rules.chunk * rules.chunk
    return visible


def _weights(products: torch.Tensor, hidden: torch.Tensor, soft_cap: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys of ``[tokens, heads, keys]``."""
    if soft_cap:
        products = soft_cap * torch.tanh(products / soft_cap)
    products = products.masked_fill_(hidden, -torch.inf)
    if sinks is None:
        return products.softmax(-1)
    with_sink = torch.cat([products, sinks[None, :, None].expand(len(products), -1, 1)], -1)
    return with_sink.softmax(-1)[..., :-1]
