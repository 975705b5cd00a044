"""Whether the settings are right, and the plugins that they name can run here."""

from collections.abc import Iterator

from blendhub.cli.checks.subject import Finding, Subject, fail, ok
from blendhub.core.errors import PluginError
from blendhub.vllm.scheduler.startup import ROOMY, finds_prefixes, why_none_is_stored
from blendhub.vllm.settings import named_plugins

NEEDED = {"matcher": "matchers", "transport": "transports", "selector": "selectors", "device": "cpu"}
"""The kinds of plugins that an engine needs, and the extra that brings one of each."""


def settings(subject: Subject) -> Iterator[Finding]:
    """The first mistake. Whether plugins can run here is checked with the plugins."""
    if subject.mistake:
        yield fail(subject.mistake)
    elif subject.role:
        yield ok(f"no mistakes; {_what_becomes_of_blended(subject)}")


def _what_becomes_of_blended(subject: Subject) -> str:
    try:
        prefixes = finds_prefixes(subject.host, subject.settings)
    except PluginError as error:
        return f"whether blended KV is stored is not known: {error}"
    if why := why_none_is_stored(subject.settings, subject.role, prefixes):
        return f"blended KV is not stored: {why}"
    if subject.settings.store_blended:
        return "blended KV is stored, too"
    return f"blended KV is stored, too, if the arena holds {ROOMY} prompts of max_model_len: vLLM's log says whether"


def plugins(subject: Subject) -> Iterator[Finding]:
    """Whether what is named can run here, and what is broken. A plugin that nothing names may need another machine."""
    named = {(plugin.kind, plugin.name): plugin.key for plugin in named_plugins(subject.settings, subject.device)}
    if store := subject.hub.store:
        named.setdefault(("store", store.name), "store")
    usable, unused = [], []
    for plugin in subject.host.plugins():
        if plugin.available:
            usable.append(f"{plugin.kind} {plugin.name}")
        elif plugin.remedy is None:
            broken = f"{plugin.kind or 'plugin'} {plugin.name} of {plugin.distribution} {plugin.version}"
            yield fail(f"{broken} is broken: {plugin.reason}", f"pip install --force-reinstall {plugin.distribution}")
        elif key := named.get((plugin.kind or "", plugin.name)):
            yield fail(f"{key}: {plugin.kind} {plugin.name} cannot run here: {plugin.reason}", plugin.remedy)
        else:
            unused.append(f"{plugin.kind} {plugin.name} ({plugin.reason})")
    for kind, extra in NEEDED.items():
        if not any(name.startswith(f"{kind} ") for name in usable):
            yield fail(f"no {kind} can be used, and an engine needs one", f"pip install 'blendhub[{extra}]'")
    if usable:
        yield ok(f"{len(usable)} can be used: {', '.join(usable)}")
    if unused:
        yield ok(f"{len(unused)} cannot run here, and nothing asks for them: {', '.join(unused)}")
