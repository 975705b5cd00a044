"""Commands that plugins add to ``blendhub``."""

import pytest

from blendhub import API_VERSION, PluginHost
from blendhub.cli import main

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
