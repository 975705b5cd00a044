"""The findings of an analysis as plain data: the report, the page and ``--json`` show these and nothing else."""

from typing import Any

import msgspec

from blendhub.tools.analysis.first_token import Costs


class Shares(msgspec.Struct, frozen=True):
    """Prompts, and the shares of their tokens that could be reused."""

    requests: int
    tokens: int
    prefix: float
    """The share that a prefix cache alone reuses."""
    exact: float
    """The share that the hub reuses bit for bit."""
    anywhere: float
    """The share that the hub reuses, wherever the text stands."""


class NamedShares(msgspec.Struct, frozen=True):
    name: str
    shares: Shares
    first_seen: str
    text: str | None = None
    """The beginning of the text; None if texts are not shown."""


class ArenaFound(msgspec.Struct, frozen=True):
    """What an arena of one size would reuse, and a prefix cache of that size."""

    tokens: int
    gib: float
    prefix: float
    exact: float
    anywhere: float
    first_token_ratio: float
    evictions: int


class StretchesFound(msgspec.Struct, frozen=True):
    """Reused stretches of ``least`` to ``most`` tokens."""

    least: int
    most: int
    number: int
    tokens: int


class TextFound(msgspec.Struct, frozen=True):
    id: str
    tokens: int
    reuses: int
    first_seen: str
    text: str | None = None


class FirstToken(msgspec.Struct, frozen=True):
    """Times to the first token relative to full prefills, and in milliseconds where the speed of prefill is given."""

    costs: Costs
    prefix_cache: float
    mean: float
    median: float
    ninetieth: float
    """The ratio that nine of ten prompts reach or stay below."""
    full_ms: float | None = None
    prefix_cache_ms: float | None = None
    mean_ms: float | None = None


class Change(msgspec.Struct, frozen=True):
    """What other matchers would reuse of the first prompts."""

    what: str
    separates: bool
    """Whether a separator is tried."""
    matchers: list[dict[str, Any]]
    before: float
    after: float
    tokens: int
    """The number of tokens in these prompts."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The subject and the way of the analysis."""

    files: list[str]
    tokenizer: str
    interrupted: bool
    read_share: float | None
    """The share of the files that was read; None if their size is not known."""
    sample: float
    late: int
    """The number of prompts that were played after later ones."""
    policy: str
    kv_bytes: int
    """The KV of one token, in bytes."""
    kv_bytes_known: bool
    """Whether ``kv_bytes`` is known; if not, it is the size for many models of 8 billion weights."""
    vllm_cache_tokens: int | None
    prefill_ms_per_1k: float | None
    seconds: dict[str, float]
    """How long reading, tokenising and playing took."""


class Broken(msgspec.Struct, frozen=True):
    """Lines that were not played."""

    number: int
    reasons: dict[str, int]
    named: list[str]
    """The first broken lines."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    about: About
    verdict: str
    first: str | None
    last: str | None
    """The times of the first and the last prompt."""
    shares: Shares
    days: list[NamedShares]
    systems: list[NamedShares]
    """The system prompts with the most tokens, and how many there are."""
    n_systems: int
    stretches: list[StretchesFound]
    texts: list[TextFound]
    arenas: list[ArenaFound]
    first_token: FirstToken
    changes: list[Change]
    broken: Broken
    config: dict[str, Any]
    """The value for ``--kv-transfer-config``."""
