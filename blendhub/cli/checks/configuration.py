"""Whether the settings are right, and the plugins that they name can run here."""

from collections.abc import Iterator

from blendhub.cli.checks.subject import Finding, Subject, fail, ok
from blendhub.core.errors import BlendHubError, PluginError
from blendhub.hub.config import plugins_of_hub
from blendhub.vllm.scheduler.startup import ROOMY, finds_prefixes, why_none_is_stored
from blendhub.vllm.settings import OF_HUB, Settings, named_plugins, replace_texts, works_within_one_process

NEEDED = {"matcher": "matchers", "transport": "transports", "selector": "selectors", "device": "cpu"}
"""The kinds of plugins that an engine needs, and the extra that brings one of each."""


def settings(subject: Subject) -> Iterator[Finding]:
    """The first mistake. Whether plugins can run here is checked with the plugins."""
    if subject.mistake:
        yield fail(subject.mistake)
    elif subject.role:
        texts: dict[str, list[int]] = {}
        # Whether a matcher finds prefixes is the same with all ids.
        chosen = replace_texts(subject.settings, subject.host, lambda key, _: texts.setdefault(key, [0]))
        try:
            sentences = [f"no mistakes; {_what_becomes_of_blended(chosen, subject)}"]
        except BlendHubError as error:  # so does vLLM's start fail
            yield fail(str(error))
            return
        sentences += [f"{key} is text, which vLLM's start refuses if it has no tokens of its own" for key in texts]
        if chosen.transport and works_within_one_process(chosen.transport, subject.host):
            name = chosen.transport.name
            sentences.append(
                f"vLLM's start refuses {name} unless its scheduler, its only worker and the hub share a process"
            )
        yield ok("; ".join(sentences))


def _what_becomes_of_blended(chosen: Settings, subject: Subject) -> str:
    """Raises the error of a matcher that cannot be made with its options."""
    try:
        for choice in chosen.matchers:
            subject.host.spec("matcher", choice.name)
    except PluginError as error:
        return f"whether blended KV is stored is not known: {error}"
    if why := why_none_is_stored(chosen, subject.role, finds_prefixes(subject.host, chosen)):
        return f"blended KV is not stored: {why}"
    if chosen.store_blended:
        return "blended KV is stored, too"
    return f"blended KV is stored, too, if the arena holds {ROOMY} prompts of max_model_len: vLLM's log says whether"


def plugins(subject: Subject) -> Iterator[Finding]:
    """Whether what is named can run here, and what is broken. A plugin that nothing names may need another machine."""
    of_hub = plugins_of_hub(subject.hub, OF_HUB if subject.role else "")
    of_all = [*named_plugins(subject.settings, subject.device), *of_hub]
    named = {(plugin.kind, plugin.name): plugin.key for plugin in reversed(of_all)}
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
