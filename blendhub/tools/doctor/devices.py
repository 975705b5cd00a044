"""Whether devices copy KV bit for bit, and turn the keys that they move."""

from collections.abc import Iterator

import msgspec

from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.builtin_plugins import install_command
from blendhub.tools.doctor.child import ask
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, fail, ok

TIMEOUT_S = 180.0
"""A device's kernels are compiled the first time."""


def devices(at: Circumstances) -> Iterator[Finding]:
    usable = [plugin.name for plugin in at.host.plugins() if plugin.kind == "device" and plugin.available]
    chosen = at.device_choice
    # One that is chosen and cannot run here is reported where plugins and settings are.
    choices = [PluginChoice(name) for name in usable] if chosen is None else [chosen] * (chosen.name in usable)
    for choice in choices:
        yield _tested(choice)


def _tested(choice: PluginChoice) -> Finding:
    options = msgspec.json.encode(choice.options).decode()
    reply = ask("blendhub.tools.doctor.device_child", choice.name, options, timeout_s=TIMEOUT_S)
    wrong = reply.trouble or next((str(report["wrong"]) for report in reply.reports), "it reported nothing")
    if not wrong:
        return ok(f"device {choice.name} saved, loaded and moved KV correctly")
    command = install_command("device", choice.name)
    return fail(
        f"device {choice.name} does not work: {wrong}",
        f"{command} --force-reinstall" if command else f"blendhub conformance device {choice.name}",
    )
