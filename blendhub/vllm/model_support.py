"""How far a loaded model can reuse KV, alone and beside the other connectors of vLLM's MultiConnector."""

from typing import Any, NamedTuple

import msgspec

from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.vllm.costs import Costs

BY_HASH = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors that identify stored KV by a request's block hashes, of which BlendHub salts those of blended blocks.

OffloadingConnector keeps the hashes that it saw when vLLM asked it for a request. So it has to be asked after BlendHub.
"""
BY_REQUEST = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors that store nothing, but send a request's KV to one other engine, for the same request."""


class ModelSupport(msgspec.Struct, frozen=True):
    """The results of a worker's start-up checks."""

    layouts: tuple[KVLayout, ...]
    """The layout of each group of layers; empty: nothing can be reused."""
    blends: bool
    """Whether moved text can be reused, and holes computed apart from the engine's own prefill."""
    reasons: tuple[str, ...]
    """A sentence for each restriction."""
    state_layouts: tuple[KVLayout, ...] = ()
    """The layout of each group of recurrent layers."""
    audits: bool = False
    """Whether blended requests can be audited."""
    holds: bool = False
    """Whether a token that the model is in doubt about can be held until its KV is exact."""
    shows_hashes: bool = False
    """Whether another connector stores KV under a request's block hashes."""
    copies: int = 1
    """The number of neighbouring ranks that hold the same KV, as far as that was measured."""
    costs: Costs | None = None
    """None if reuse and prefill are not compared by time."""


def unsupported(reason: str) -> ModelSupport:
    return ModelSupport((), False, (reason,))


class Neighbours(NamedTuple):
    """The connectors beside BlendHub, by their classes' names."""

    load_failure_policy: str
    before: tuple[str, ...] = ()
    """The connectors that vLLM asks before BlendHub."""
    behind: tuple[str, ...] = ()
    are_known: bool = True
    """Whether vLLM says which connectors there are."""

    @property
    def identify_by_hash(self) -> bool:
        """Whether one of them stores KV under block hashes."""
        return not set(BY_HASH).isdisjoint(self.before + self.behind)

    @property
    def refusal(self) -> str:
        """Why no text is moved beside them; empty if it can be."""
        exact = "exact prefixes are reused all the same"
        if not self.are_known:
            return f"text is not moved, because this vLLM does not say which connectors stand beside; {exact}"
        if others := [name for name in self.before + self.behind if name not in BY_HASH + BY_REQUEST]:
            return f"text is not moved beside {others[0]}, which may store what was blended as exact; {exact}"
        if early := [name for name in self.before if name in BY_HASH]:
            return (
                f"text is not moved behind {early[0]}, which then mistakes what will be blended for exact; name "
                f"BlendHubConnector before it in connectors; {exact}"
            )
        return ""

    def check_policy(self) -> None:
        """Raise Unsupported if a load that fails would end its request: vLLM looks at MultiConnector's policy only."""
        if self.load_failure_policy != "recompute":
            raise Unsupported(
                f"kv_load_failure_policy of MultiConnector is {self.load_failure_policy!r}, with which a load that "
                'fails ends the request; set "kv_load_failure_policy": "recompute" beside "kv_connector"'
            )


def neighbours_of(own: Any, outer: Any) -> Neighbours | None:
    """The connectors beside this one in ``outer``, the connector that vLLM knows; None if it stands alone."""
    if outer is own:
        return None
    policy = outer._kv_transfer_config.kv_load_failure_policy
    connectors = getattr(outer, "sub_connectors", None)  # not every version has it
    if connectors is None:
        return Neighbours(policy, are_known=False)
    at = connectors.index(own)
    names = [type(connector).__name__ for connector in connectors]
    return Neighbours(policy, tuple(names[:at]), tuple(names[at + 1 :]))


def beside(neighbours: Neighbours, support: ModelSupport) -> ModelSupport:
    """What a model that blends supports beside other connectors."""
    if neighbours.refusal:
        return msgspec.structs.replace(support, blends=False, reasons=(neighbours.refusal,))
    return msgspec.structs.replace(support, shows_hashes=neighbours.identify_by_hash)
