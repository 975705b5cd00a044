"""The host: what it finds, and what becomes of plugins that are broken in every way we could think of."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from blendhub import API_VERSION, Plugin, PluginHost
from blendhub.core.errors import PluginError
from blendhub.framework.builtin_plugins import HOMES, owner_of
from blendhub.framework.discovery import CONTRACTS
from blendhub.testing import ReferenceMatcher

GOOD = """
    from typing import Annotated
    import msgspec
    from blendhub import PluginSpec, Unavailable, hookimpl
    from blendhub.testing import ReferenceMatcher

    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        least: Annotated[int, msgspec.Meta(ge=1, description="shortest match")] = 4

    def make(options):
        return ReferenceMatcher("anywhere", options.least)

    def spec(**changes):
        fields = dict(name="mine", api=1, summary="a matcher", factory=make, options=Options)
        return PluginSpec(**{**fields, **changes})
"""


def offering(specs: str, kind: str = "matcher") -> str:
    """The source of a module that offers these specs."""
    return (
        GOOD
        + f"""
    @hookimpl
    def blendhub_{kind}s():
        return {specs}
"""
    )


def only(host: PluginHost) -> Plugin:
    (plugin,) = host.plugins()
    return plugin


def test_a_sound_plugin_is_described_and_created(site):
    site.install("mine-plugin", offering("[spec(capabilities=('anywhere',))]"), version="2.3")
    host = site.host()
    plugin = only(host)
    assert (plugin.kind, plugin.name, plugin.distribution, plugin.version) == ("matcher", "mine", "mine-plugin", "2.3")
    assert plugin.api == API_VERSION and plugin.available and plugin.reason is None
    assert plugin.capabilities == ("anywhere",)
    assert [option["name"] for option in plugin.options] == ["least"]
    matcher = host.create("matcher", "mine", {"least": 9})
    assert isinstance(matcher, ReferenceMatcher) and matcher.guaranteed_tokens == 9
    assert host.create("matcher", "mine").guaranteed_tokens == 4


BROKEN_MODULES = {
    "leaves": ("raise SystemExit(3)", "import of leaves failed: SystemExit: 3"),
    "empty": ("x = 1", "offers nothing"),
    "misspelt": (
        "from blendhub import hookimpl\n@hookimpl\ndef blendhub_matchrs(): return []",
        "hooks that plugin API 1 does not have: 'blendhub_matchrs' (did you mean 'blendhub_matchers'?); "
        "the hooks are: blendhub_commands, blendhub_devices, ",
    ),
    "with-parameters": (
        "from blendhub import hookimpl\n@hookimpl\ndef blendhub_request_done(request): ...",
        "blendhub_request_done",
    ),
    "raises": (offering("1 / 0"), "its hook blendhub_matchers failed: ZeroDivisionError"),
}
BROKEN_SPECS = {
    "broken": ("'mine'", "blendhub_matchers returned 'mine', which is not a blendhub.PluginSpec"),
    "older": (
        "spec(name='older', api=0)",
        "made for plugin API 0, this BlendHub has 1; install a newer release",
    ),
    "newer": ("spec(name='newer', api=2)", "made for plugin API 2, this BlendHub has 1; install a newer BlendHub"),
    "unknown": ("spec(name='unknown', api='1')", "api = '1', which should be an integer"),
    "named": ("spec(name='named', factory='a-b:c')", "or its name as 'module:Class'"),
    "bare": (
        "spec(name='bare', options=msgspec.defstruct('Bare', [('size', int), ('speed', int, 1)]))",
        "Bare need a default for every field, but have none for size",
    ),
    "odd": (
        "spec(name='odd', options=msgspec.defstruct('Odd', [('thing', complex, 1j)], forbid_unknown_fields=True))",
        "its options Odd cannot be described",
    ),
    "open": (
        "spec(name='open', options=msgspec.defstruct('Open', [('size', int, 1)]))",
        "its options Open take any name, so a misspelt one would pass",
    ),
    "absent": ("spec(name='absent', probe=lambda: Unavailable('no card', 'pip install a-card'))", "no card"),
    "leaving": ("spec(name='leaving', probe=lambda: exit(1))", "its probe failed: SystemExit: 1"),
    "answering": (
        "spec(name='answering', probe=lambda: False)",
        "its probe returned False, which should be None or a blendhub.Unavailable",
    ),
}


def test_a_broken_module_is_listed_and_harms_no_other(site):
    for name, (source, _) in BROKEN_MODULES.items():
        site.install(name, source)
    site.install("nameless", "x = 1")
    (site.path / "nameless-1.0.dist-info" / "METADATA").unlink()
    site.install("mine-plugin", offering("[spec()]"))
    host = site.host()
    plugins = {plugin.distribution: plugin for plugin in host.plugins()}
    assert plugins["mine-plugin"].available and len(plugins) == len(BROKEN_MODULES) + 2
    assert isinstance(host.create("matcher", "mine"), ReferenceMatcher)
    for name, (_, reason) in BROKEN_MODULES.items():
        plugin = plugins[name]
        assert plugin.kind is None and not plugin.available and reason in (plugin.reason or "")


def test_a_broken_spec_is_listed_with_its_fault_and_harms_no_other(site):
    site.install("broken", offering(f"[{', '.join(spec for spec, _ in BROKEN_SPECS.values())}, spec(name='sound')]"))
    host = site.host()
    plugins = {plugin.name: plugin for plugin in host.plugins()}
    assert plugins.pop("sound").available and plugins.keys() == BROKEN_SPECS.keys()
    for name, (_, reason) in BROKEN_SPECS.items():
        assert plugins[name].kind == "matcher" and not plugins[name].available
        assert reason in (plugins[name].reason or "")
        with pytest.raises(PluginError, match=rf"matcher '{name}' of broken cannot be used: "):
            host.create("matcher", name)
    assert plugins["open"].options == [] and plugins["absent"].remedy == "pip install a-card"
    assert [option["name"] for option in plugins["absent"].options] == ["least"]


def test_details_that_fail_take_nothing_from_the_plugin(site):
    site.install("mine-plugin", offering("[spec(details=lambda: 1 / 0)]"))
    plugin = only(site.host())
    assert plugin.available and plugin.details == ("its details failed: ZeroDivisionError: division by zero",)


FACTORIES = {
    "makes something else": ("lambda options: object()", "made a object, which is not a blendhub.contracts.Matcher"),
    "is in a broken module": ("'mine_broken:Late'", "'mine_broken:Late' .*ZeroDivisionError: division by zero"),
    "cannot be called": ("'mine_late:number'", "is 7, which cannot be called"),
}


@pytest.mark.parametrize("factory, reason", FACTORIES.values(), ids=FACTORIES)
def test_a_factory_that(site, factory, reason):
    site.install("mine-plugin", offering(f"[spec(factory={factory})]"), version="0.3")
    (site.path / "mine_late.py").write_text("Late = dict\nnumber = 7\n")
    (site.path / "mine_broken.py").write_text("1 / 0")
    with pytest.raises(PluginError, match=f"^matcher 'mine' of mine-plugin 0.3: its factory .*{reason}"):
        site.host().create("matcher", "mine")


def test_a_factory_may_be_named_and_is_imported_on_first_use(site):
    site.install("mine-plugin", offering("[spec(factory='mine_late:Late')]"))
    (site.path / "mine_late.py").write_text(
        "from blendhub.testing import ReferenceMatcher\n"
        "class Late(ReferenceMatcher):\n"
        "    def __init__(self, options): super().__init__('anywhere', options.least)\n"
    )
    host = site.host()
    assert only(host).available and "mine_late" not in sys.modules
    assert host.create("matcher", "mine", {"least": 9}).guaranteed_tokens == 9
    assert sys.modules["mine_late"].Late


def test_a_name_offered_twice_is_refused_for_both(site):
    site.install("first-plugin", offering("[spec(), spec(name='other')]"))
    site.install("second-plugin", offering("[spec()]"), version="0.4")
    host = site.host()
    twice = [plugin for plugin in host.plugins() if plugin.name == "mine"]
    assert [plugin.available for plugin in twice] == [False, False]
    for plugin in twice:
        assert "first-plugin 1.0 and by second-plugin 0.4" in plugin.reason
    with pytest.raises(PluginError, match="offered 2 times"):
        host.create("matcher", "mine")
    assert isinstance(host.create("matcher", "other"), ReferenceMatcher)


def test_a_plugin_that_takes_the_name_of_a_built_in_one_disables_only_itself(site):
    """Both were refused, and with them the default of every engine."""
    site.install("a-stranger", offering("[spec(name='prefix'), spec(name='free')]"), version="3.1")
    # Not the name of the real module, which another test may have imported.
    site.install("blendhub_matchers", offering("[spec(name='prefix')]"), module="built_in")
    host = site.host()
    plugins = {plugin.distribution: plugin for plugin in host.plugins() if plugin.name == "prefix"}
    assert plugins["blendhub_matchers"].available and not plugins["a-stranger"].available
    assert "'prefix' is the name of a plugin of blendhub-matchers" in plugins["a-stranger"].reason
    assert "so that of a-stranger 3.1 is ignored" in plugins["a-stranger"].reason
    assert isinstance(host.create("matcher", "prefix"), ReferenceMatcher)
    assert isinstance(host.create("matcher", "free"), ReferenceMatcher)


def test_an_unknown_name_is_answered_with_the_valid_ones(site):
    site.install("mine-plugin", offering("[spec()]"))
    site.install("broken", "import nowhere_to_be_found")
    with pytest.raises(PluginError) as caught:
        site.host().create("matcher", "min")
    message = str(caught.value)
    assert "did you mean 'mine'?" in message and "installed: mine" in message
    assert "broken (broken) is broken: import of broken failed" in message
    with pytest.raises(PluginError, match=r"no plugin kind 'matchers' \(did you mean 'matcher'\?\); kinds: matcher"):
        site.host().create("matchers", "mine")


@pytest.mark.parametrize("kind, name, extra", [("matcher", "rolling_hash", "matchers"), ("device", "cuda", "cuda")])
def test_a_known_plugin_that_is_not_installed_is_answered_with_what_to_install(site, kind, name, extra):
    with pytest.raises(PluginError) as caught:
        site.host().create(kind, name)
    assert str(caught.value).endswith(f"; it comes with: pip install 'blendhub[{extra}]'")


def test_the_table_of_homes_is_that_of_the_repository_s_distributions():
    """A plugin added or renamed here needs its line in the table, which says how to install it."""
    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    registered = {}
    for file in root.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        for module in project["entry-points"]["blendhub"].values():
            for kind in CONTRACTS:
                for spec in getattr(importlib.import_module(module), f"blendhub_{kind}s", list)():
                    registered[kind, spec.name] = project["name"]
    assert {key: owner_of(*key) for key in HOMES} == registered
    for key, extra in HOMES.items():
        assert registered[key] in extras[extra]
