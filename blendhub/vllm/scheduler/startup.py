"""The start-up lines in vLLM's log: what is reused, how large the arena is, and what restricts reuse.

``lines`` composes them; ``ArenaWatch`` logs them when a session is open, and again when the hub came back with another
arena.
"""

import logging
import os

import msgspec

from blendhub.client.arena_view import SHM, SHM_ADVICE
from blendhub.client.hub_client import HubClient
from blendhub.contracts import ArenaProgress
from blendhub.core.layout import Namespace
from blendhub.framework.host import PluginHost
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.settings import OWNER, Mode, Settings

log = logging.getLogger(__name__)
ROOMY = 4
"""The number of longest prompts that an arena must hold to have room for blended KV by default."""


class StartupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's facts that the lines state."""

    settings: Settings
    support: ModelSupport
    """What the loaded model supports."""
    role: str
    """vLLM's kv_role."""
    max_model_len: int
    namespace: Namespace
    finds_prefixes: bool
    """Whether a matcher finds whole prefixes again."""
    looks_ahead: bool = False
    """Whether vLLM has a drafter on hidden states: its KV of a token depends on the next one."""


class Line(msgspec.Struct, frozen=True):
    level: int
    text: str


def tokens_of(arena_bytes: int, namespace: Namespace) -> int:
    """How many tokens of a model an arena holds, if it holds nothing else."""
    return arena_bytes // namespace.slot_bytes * namespace.layout.chunk_tokens


def finds_prefixes(host: PluginHost, settings: Settings) -> bool:
    """Whether one of the matchers finds whole prefixes: without one, blended KV would never be found again."""
    chosen = (host.create("matcher", choice.name, choice.options) for choice in settings.matchers)
    return any(matcher.reach == "prefix" for matcher in chosen)


def why_none_is_stored(settings: Settings, role: str, finds_prefixes: bool) -> str:
    """The setting that keeps blended KV from being stored, whatever the arena holds; empty if there is none."""
    if role == "kv_consumer":
        return "kv_role is kv_consumer"
    if not settings.store:
        return "store is false"
    if settings.store_blended is False:
        return "store_blended is false"
    if not finds_prefixes:
        names = ", ".join(choice.name for choice in settings.matchers)
        return f'none of the matchers ({names}) finds prefixes; add {{"name": "prefix"}} to {OWNER}.matchers'
    return ""


def why_no_blended(facts: StartupFacts, arena_bytes: int) -> str:
    """Why blended KV is not stored; empty if it is stored."""
    why = why_none_is_stored(facts.settings, facts.role, facts.finds_prefixes)
    has_room = tokens_of(arena_bytes, facts.namespace) >= ROOMY * facts.max_model_len
    if why or facts.settings.store_blended or has_room:
        return why
    needed = _gib_for(ROOMY * facts.max_model_len, facts.namespace)
    return (
        f"the arena holds less than {ROOMY} prompts of max_model_len {facts.max_model_len:,}; {_how_to_enlarge(facts)} "
        f"to at least {needed:.1f}, or {OWNER}.store_blended to true"
    )


def lines(facts: StartupFacts, arena: ArenaProgress) -> list[Line]:
    """The lines to log."""
    tokens = tokens_of(arena.goal, facts.namespace)
    so_far = f" ({_size(arena.reserved)} of them reserved so far)" if arena.left else ""
    composed = [
        Line(
            logging.INFO,
            f"BlendHub: {_what_is_reused(facts)}; {_where(facts)}; "
            f"arena {_size(arena.goal)}{so_far}: about {tokens:,} tokens of this model"
            f"{_and_states(facts)}{_and_blended(facts, arena.goal)}",
        )
    ]
    if not tokens:
        composed.append(Line(logging.WARNING, _nothing_fits(facts, arena.goal)))
    elif tokens < facts.max_model_len:
        composed.append(
            Line(
                logging.WARNING,
                f"BlendHub: the arena holds {tokens:,} tokens, less than one prompt of max_model_len "
                f"{facts.max_model_len:,}: longer prompts push each other out; {_how_to_enlarge(facts)} to at least "
                f"{_gib_for(facts.max_model_len, facts.namespace):.1f}, which takes as much of /dev/shm",
            )
        )
    return composed


class ArenaWatch:
    """Logs what the arena holds. For one thread; waits for nothing."""

    def __init__(self, facts: StartupFacts, client: HubClient) -> None:
        self._facts = facts
        self._client = client
        self.stores_blended = False
        """Whether blended KV is stored, too."""
        self._logged = ""
        """The arena that was described in the last lines."""

    def look(self) -> None:
        """Notice a hub that came or came back."""
        arena = self._client.arena
        if arena and arena.name.nonce != self._logged:
            self._logged = arena.name.nonce
            progress = arena.progress()
            self.stores_blended = not why_no_blended(self._facts, progress.goal)
            for line in lines(self._facts, progress):
                log.log(line.level, "%s", line.text)


def _what_is_reused(facts: StartupFacts) -> str:
    if facts.role == "kv_producer":
        return "text is stored, and none reused, as kv_role says"
    text = "text" if facts.settings.donors == "all" else "text of trusted donors"
    kinds: dict[Mode, str] = {
        "blend": f"{text} is reused anywhere" if facts.support.blends else "exact prefixes are reused",
        "contiguous": f"{text} is reused up to the first token that is not stored, as the mode says"
        if facts.support.blends
        else "exact prefixes are reused",
        "exact": "exact prefixes are reused, as the mode says",
        "off": "nothing is reused unless a request asks for it, as the mode says",
    }
    return kinds[facts.settings.mode]


def _and_states(facts: StartupFacts) -> str:
    space = facts.namespace
    token_bytes = space.slot_bytes // space.chunk_tokens
    n_tokens = -(-space.world_size * space.state_bytes // token_bytes)
    return f", or {n_tokens:,} fewer for each state" if n_tokens else ""


def _and_blended(facts: StartupFacts, arena_bytes: int) -> str:
    if not facts.support.blends or facts.role == "kv_producer":  # nothing is blended
        return ""
    why = why_no_blended(facts, arena_bytes)
    return f"; blended KV is not stored: {why}" if why else "; blended KV is stored, too"


def _where(facts: StartupFacts) -> str:
    settings = facts.settings
    return f"hub at {settings.endpoint}" if settings.endpoint else f"embedded hub in a {settings.hub.embedded}"


def _nothing_fits(facts: StartupFacts, arena_bytes: int) -> str:
    space = facts.namespace
    sentence = (
        f"BlendHub: nothing is stored, because not one chunk of this model fits: {space.layout.chunk_tokens} tokens "
        f"take {_size(space.slot_bytes)}, and the arena has {_size(arena_bytes)}"
    )
    if not facts.settings.endpoint:
        room = os.statvfs(SHM)
        sentence += f", of {_size(room.f_blocks * room.f_frsize)} of shared memory. Make {SHM} larger: {SHM_ADVICE}"
    return f"{sentence}; then {_how_to_enlarge(facts)}, or leave it out; or lower {OWNER}.chunk_tokens"


def _how_to_enlarge(facts: StartupFacts) -> str:
    return "set arena_gib of that hub" if facts.settings.endpoint else f"set {OWNER}.hub.arena_gib"


def _gib_for(tokens: int, namespace: Namespace) -> float:
    slots = -(-tokens // namespace.layout.chunk_tokens)
    # Rounded up, so that what is advised is enough.
    return -(-slots * namespace.slot_bytes * 10 // 2**30) / 10


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"
