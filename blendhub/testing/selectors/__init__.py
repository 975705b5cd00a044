"""The conformance suite of selectors: each test stands for a sentence of :mod:`blendhub.contracts.selector`."""

from collections.abc import Mapping
from typing import Any

from blendhub.framework.host import PluginHost
from blendhub.testing.selectors.picking import AgreeingTests, MeasuringTests, PickingTests
from blendhub.testing.selectors.scoring import ScoringTests

__all__ = ["MeasuringTests", "ScoringTests", "SelectorSuite"]


class SelectorSuite(PickingTests, AgreeingTests):
    """Subclass it as ``class TestMine(SelectorSuite)`` with a ``create`` that returns a new selector. One that asks for
    attention has ``MeasuringTests`` as a second base; one that asks for scores, ``ScoringTests`` as a third.
    """

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type["SelectorSuite"]:
        """The suite of an installed selector; raises if it cannot be created with these options."""

        def create(suite: object) -> Any:
            return host.create("selector", name, options)

        selector = create(None)
        bases: list[type] = [cls]
        if selector.probe_layer or selector.attended_layers:
            bases.append(MeasuringTests)
        if selector.probe_layer:
            bases.append(ScoringTests)
        capabilities = host.spec("selector", name).capabilities
        return type("TestInstalledSelector", tuple(bases), {"create": create, "capabilities": capabilities})
