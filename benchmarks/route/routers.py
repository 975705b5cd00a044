"""The routers that are compared, and the engines that they send prompts to: hubs without KV."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from blendhub_tools.analysis.lines import Place
from blendhub_tools.analysis.simulated_hub import SimulatedHub

from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from examples.router.choice import Loads, choose

HALF_LIFE = 30
"""In prompts an engine."""
SLACK_PROMPTS = 1
BLOCK = 64
"""The tokens whose hash the prefix-affine router compares."""


class Router(ABC):
    """Knows the engines' loads; how much each engine reuses, it asks or guesses."""

    def __init__(self, hubs: list[SimulatedHub]) -> None:
        self.hubs = hubs

    @abstractmethod
    def reused(self, tokens: Tokens) -> list[float]:
        """The tokens that each engine would reuse."""

    @abstractmethod
    def sent(self, tokens: Tokens, engine: int) -> None:
        """A prompt went to this engine."""


class AskingRouter(Router):
    """Asks each hub, as ``POST /score`` does."""

    def reused(self, tokens: Tokens) -> list[float]:
        return [float(sum(hub.score(tokens))) for hub in self.hubs]

    def sent(self, tokens: Tokens, engine: int) -> None:
        """Do nothing: the hub itself knows what it stores."""


class PrefixAffineRouter(Router):
    """Remembers where each beginning of a prompt was sent, and takes it for cached there, as routers do today."""

    def __init__(self, hubs: list[SimulatedHub]) -> None:
        super().__init__(hubs)
        self._sent: dict[int, set[int]] = {}

    def reused(self, tokens: Tokens) -> list[float]:
        found = [0.0] * len(self.hubs)
        for end, prefix in _prefixes(tokens):
            engines = self._sent.get(prefix)
            if not engines:
                break
            for engine in engines:
                found[engine] = float(end)
        return found

    def sent(self, tokens: Tokens, engine: int) -> None:
        for _, prefix in _prefixes(tokens):
            self._sent.setdefault(prefix, set()).add(engine)


class Routed(NamedTuple):
    """The second half of a trace: the first half fills the arenas."""

    tokens: int
    reused: int
    loads: list[float]
    """The tokens that each engine computed."""

    @property
    def greatest_load(self) -> float:
        """Relative to the mean."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def route(kind: type[Router], host: PluginHost, prompts: Iterator[Tokens], n: int, engines: int, slots: int) -> Routed:
    """Send ``n`` prompts an engine; each engine has an arena of so many chunks."""
    hubs = [SimulatedHub(host, DEFAULT_MATCHERS, [slots]) for _ in range(engines)]
    router, loads = kind(hubs), Loads(engines, HALF_LIFE)
    tokens = reused = 0
    computed = [0.0] * engines
    for number, prompt in enumerate(islice(prompts, n * engines)):
        now = number / engines
        engine = choose(router.reused(prompt), loads.now(now), len(prompt), SLACK_PROMPTS * len(prompt))
        router.sent(prompt, engine)
        (found,) = hubs[engine].play(prompt, Place("trace", number)).reused
        loads.add(engine, len(prompt) - sum(found), now)
        if 2 * number >= n * engines:
            tokens += len(prompt)
            reused += sum(found)
            computed[engine] += len(prompt) - sum(found)
    return Routed(tokens, reused, computed)


def _prefixes(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """The ends of the whole blocks, and a name for the text up to each."""
    name = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        name = hash((name, tokens[end - BLOCK : end].tobytes()))
        yield end, name
