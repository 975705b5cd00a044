"""Whether each installed plugin can run here, and whether there is one of each kind that is needed."""

from collections.abc import Iterator

from blendhub.framework.builtin_plugins import HOMES, same_distribution
from blendhub.framework.discovery import Plugin
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, fail, ok, warn

NEEDED = {
    "matcher": "pip install 'blendhub[matchers]'",
    "transport": "pip install 'blendhub[transports]'",
    "selector": "pip install 'blendhub[selectors]'",
    "device": "pip install 'blendhub[cpu]'",
}
"""The kinds of plugins that an engine needs, and what installs one of each kind."""


def plugins(at: Circumstances) -> Iterator[Finding]:
    found = at.host.plugins()
    for plugin in found:
        if not plugin.available and plugin.is_missed:
            yield _unusable(plugin)
    for kind, command in NEEDED.items():
        if not any(plugin.kind == kind and plugin.available for plugin in found):
            yield fail(f"no {kind} can be used, and an engine needs one", command)
    usable = [f"{plugin.kind} {plugin.name}" for plugin in found if plugin.available]
    if usable:
        yield ok(f"{len(usable)} can be used: {', '.join(usable)}")
    unmissed = [f"{plugin.kind} {plugin.name} ({plugin.reason})" for plugin in found if not plugin.is_missed]
    if unmissed:
        yield ok(f"{len(unmissed)} are for what this machine does not have: {', '.join(unmissed)}")


def _unusable(plugin: Plugin) -> Finding:
    named = f"{plugin.kind or 'plugin'} {plugin.name} of {plugin.distribution} {plugin.version}"
    if plugin.remedy:
        return warn(f"{named} cannot run here: {plugin.reason}", plugin.remedy)
    is_ours = any(same_distribution(plugin.distribution, f"blendhub-{extra}") for extra in HOMES.values())
    command = "pip install --force-reinstall" if is_ours else "pip uninstall"
    return fail(f"{named} is broken: {plugin.reason}", f"{command} {plugin.distribution}")
