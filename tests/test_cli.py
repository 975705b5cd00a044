"""The command line: what it prints, and the exit codes that scripts rely on."""

import json
import sys

import pytest

from blendhub import API_VERSION, PluginHost
from blendhub.cli import main
from blendhub.testing.matchers import MatcherSuite

KEYS = {"kind", "name", "distribution", "version", "api", "summary", "available", "reason", "remedy"}
KEYS |= {"details", "capabilities", "options"}

MATCHER = """
    from blendhub import PluginSpec, Unavailable, hookimpl
    from blendhub.testing import ReferenceMatcher

    class Forgetful(ReferenceMatcher):
        def match(self, tokens):
            return super().match(tokens)[:0]

    def spec(name, **more):
        return PluginSpec(name=name, api=1, summary="it matches", **more)

    @hookimpl
    def blendhub_matchers():
        return [
            spec("sound", factory=lambda: ReferenceMatcher("anywhere", 16)),
            spec("varied", factory=Forgetful, details=lambda: ("slow here: no [such] card", "two threads")),
            spec("forgetful", factory=lambda: Forgetful("anywhere", 16)),
            spec("absent", factory=Forgetful, probe=lambda: Unavailable("no [such] card", "pip install a-card")),
        ]
"""


@pytest.fixture
def plugins(site, monkeypatch):
    """Two distributions beside what is installed: one that works, one that does not."""
    site.install("extra-matchers", MATCHER)
    site.install("broken", "import nowhere_to_be_found")
    monkeypatch.setenv("PYTHONPATH", str(site.path))


def test_plugins_are_listed_for_people_and_as_json_with_the_documented_keys(plugins, capsys):
    assert main(["plugins", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert all(set(plugin) == KEYS for plugin in listed)
    by_name = {plugin["name"]: plugin for plugin in listed}
    assert by_name["sound"]["available"] and by_name["sound"]["distribution"] == "extra-matchers"
    assert not by_name["absent"]["available"] and by_name["absent"]["remedy"] == "pip install a-card"
    assert by_name["broken"]["kind"] is None and "ModuleNotFoundError" in by_name["broken"]["reason"]
    assert main(["plugins"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["matcher", "sound", "it matches (extra-matchers 1.0, API 1)"] in lines
    assert ["yes;", "slow", "here: no [such] card; two threads"] in lines
    assert ["no:", "no", "[such] card; to change it: pip install a-card"] in lines


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["conformance", "matcher", "soundd"], "no matcher 'soundd' (did you mean 'sound'?)"),
        (["conformance", "matchr", "sound"], "no conformance suite for kind 'matchr'"),
        (["conformance", "matcher", "absent"], "cannot be used: no [such] card"),
        (["conformance", "matcher", "sound", "--options", "{"], "--options '{' is not a JSON object"),
        (["conformance", "matcher", "sound", "--options", '{"x": 1}'], "Object contains unknown field `x`"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(plugins, capsys, arguments, complaint):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and complaint in error and error.count("\n") == 1


def test_conformance_without_its_extra_says_what_to_install(plugins, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert main(["conformance", "matcher", "sound"]) == 2
    assert "pip install 'blendhub[testing]'" in capsys.readouterr().err


@pytest.mark.slow
def test_conformance_shows_what_to_mend_first_and_what_failed(plugins, capfd):
    assert main(["conformance", "matcher", "sound", "-k", "seeds_agree or found_whole"]) == 0
    assert "conformance: 2 passed, 0 failed, 0 do not apply" in capfd.readouterr().out
    assert main(["conformance", "matcher", "forgetful", "-k", "found_whole or known_reach"]) == 1
    shown = capfd.readouterr().out
    first, _, _ = shown.partition("tests of the contract that failed")
    assert "The stored tokens that this prompt repeats, within the matcher's reach.\n\nwhat the test did:\n" in first
    assert "    def test_a_stored_text_is_found_whole_and_no_other(" in first and "checked.match(" in first
    assert "\n\nwhat it saw:\n    AssertionError: " in first
    assert "\ntest_a_stored_text_is_found_whole_and_no_other\n" in shown
    assert "conformance: 1 passed, 1 failed, 0 do not apply" in shown


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["no_such_test", "test_a_prefix_stored_as_exact_is_exact"])
def test_conformance_fails_when_nothing_ran(plugins, capfd, expression):
    assert hasattr(MatcherSuite, "test_a_prefix_stored_as_exact_is_exact")
    assert main(["conformance", "matcher", "sound", "-k", expression]) != 0
    assert "nothing ran, so nothing is proven" in capfd.readouterr().out


COMMANDS = """
from blendhub import PluginSpec, hookimpl
from blendhub.contracts import Command
from blendhub.core.errors import InvalidInput


class Greet(Command):
    def add_arguments(self, parser):
        parser.add_argument("name")

    def run(self, arguments):
        if arguments.name == "nobody":
            raise InvalidInput("nobody is there")
        print("hello", arguments.name)
        return 3


@hookimpl
def blendhub_commands():
    return [PluginSpec(name=name, api=API, summary="says hello", factory=Greet) for name in ("greet", "serve")]
"""


@pytest.fixture
def greet(site, monkeypatch):
    site.install("greeting", COMMANDS.replace("API", str(API_VERSION)))
    monkeypatch.setattr(PluginHost, "discover", site.host)


def test_a_stranger_s_command_runs_like_one_of_the_core(greet, capsys):
    assert main(["greet", "you"]) == 3
    shown = capsys.readouterr()
    assert shown.out == "hello you\n" and "a plugin's command serve is ignored" in shown.err
    assert main(["greet", "nobody"]) == 2
    assert "blendhub: nobody is there\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "says hello" in capsys.readouterr().out
    assert main(["plugins"]) == 0 and "says hello (greeting 1.0, API" in capsys.readouterr().out


def test_a_command_of_ours_that_is_not_installed_says_what_brings_it(greet, capsys):
    assert main(["analyze", "log"]) == 2
    assert "the command analyze comes with: pip install 'blendhub[tools]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["analyse"])
    assert "invalid choice: 'analyse'" in capsys.readouterr().err
