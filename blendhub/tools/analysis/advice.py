"""Turns the findings of an analysis into advice; pure functions."""

from collections.abc import Sequence
from typing import Any

from blendhub.tools.analysis.findings import ArenaFound, Change, Shares

WORTH_IT = 0.05
"""A share of the tokens, beyond what a prefix cache reuses, below which a connector is not worth its effort."""

WORTH_MOVING = 0.02
WORTH_A_MATCHER = 0.01
NEARLY_ALL = 0.95
"""The share of the largest arena's reuse that the advised arena must reach."""

CONNECTOR = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}


def verdict(shares: Shares) -> str:
    """One sentence that says whether a hub will help."""
    gain = shares.anywhere - shares.prefix
    found = (
        f"{shares.anywhere:.0%} of the prompt tokens were seen before; a prefix cache would reuse {shares.prefix:.0%}"
    )
    if shares.anywhere < WORTH_IT:
        return f"BlendHub would not help here: {found}."
    if gain < WORTH_IT:
        return f"BlendHub would reuse little more than a prefix cache: {found}. A larger cache may help, see the curve."
    if shares.anywhere - shares.exact < WORTH_MOVING:
        return f"BlendHub would help with exact reuse alone: {found}."
    return f"BlendHub would help: {found}."


def advised_arena(arenas: Sequence[ArenaFound]) -> ArenaFound:
    """The smallest arena that reuses nearly as much as the largest one."""
    return next(arena for arena in arenas if arena.anywhere >= NEARLY_ALL * arenas[-1].anywhere)


def config(shares: Shares, arenas: Sequence[ArenaFound], changes: Sequence[Change]) -> dict[str, Any]:
    """The value of ``--kv-transfer-config`` for such prompts."""
    settings: dict[str, Any] = {"hub": {"arena_gib": float(f"{advised_arena(arenas).gib:.3g}")}}
    if shares.anywhere - shares.exact < WORTH_MOVING:
        settings["mode"] = "exact"
    worth = [change for change in changes if change.after - change.before >= WORTH_A_MATCHER]
    if worth and "mode" not in settings:
        settings["matchers"] = max(worth, key=lambda change: change.after).matchers
    return {**CONNECTOR, "kv_connector_extra_config": {"blendhub": settings}}
