"""Commands that people run beside a server: what reuse would bring, and what it costs."""

from collections.abc import Iterable

from blendhub import PluginSpec, hookimpl
from blendhub.contracts import Command


@hookimpl
def blendhub_commands() -> Iterable[PluginSpec[Command]]:
    return [
        PluginSpec(
            name="analyze",
            api=1,
            summary="find out from your request logs how much could be reused",
            factory="blendhub_tools.analyze:Analyze",
        ),
        PluginSpec(
            name="advise",
            api=1,
            summary="measure what reuse costs your model on your prompts, and find what holds an agreement",
            factory="blendhub_tools.advise:Advise",
        ),
    ]
