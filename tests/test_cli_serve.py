"""The configuration of a hub: files, flags, mistakes, and its document."""

import os
import re
import stat

import pytest

from blendhub.cli import main
from blendhub.core.errors import HubError
from blendhub.framework.options import describe_options
from blendhub.hub.config import HubConfig, Listen, StoreChoice, as_toml, load_config
from blendhub.system.default_paths import default_endpoint


def test_what_is_printed_is_a_configuration_that_serves(tmp_path, capsys):
    file = tmp_path / "hub.toml"
    file.write_text('arena_gib = 2\nsilence_s = 5\nstore = {options = {path = "/x", capacity_gib = 1.5}}\n')
    flags = ["--endpoint", "ipc:///a/b", "--arena-gib", "0.5", "--store", "/y"]
    assert main(["serve", "--config", str(file), *flags, "--print-config"]) == 0
    printed = capsys.readouterr().out
    file.write_text(printed)
    assert load_config(file) == HubConfig(
        listen=(Listen(endpoint="ipc:///a/b"),),
        arena_gib=0.5,
        silence_s=5,
        store=StoreChoice(options={"path": "/y", "capacity_gib": 1.5}),
    )
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_a_store_is_named_beside_its_options(tmp_path, capsys):
    config = tmp_path / "hub.toml"
    for text, flags, name, options in (
        ("", [], "disk", {}),
        ('[store]\nname = "a-store"\noptions = {rate = 1, kept = true}\n', [], "a-store", {"kept": True}),
        ('[store]\nname = "a-store"\noptions = {lost = 1}\n', ["--store", "disk"], "disk", {}),
    ):
        config.write_text(text)
        given = [*flags, "--store-option", "url=redis://:a=b@h:1/0", "--store-option", "rate=2.5"]
        assert main(["serve", "--config", str(config), *given, "--print-config"]) == 0
        config.write_text(capsys.readouterr().out)
        assert load_config(config).store == StoreChoice(name, {**options, "url": "redis://:a=b@h:1/0", "rate": 2.5})


def test_without_flags_the_defaults_are_printed_with_every_key(capsys):
    assert main(["serve", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed == as_toml(HubConfig())
    assert all(re.search(rf"^(# )?\[*{key['name']}\b", printed, re.M) for key in describe_options(HubConfig))


@pytest.mark.parametrize(
    "text, flags, complaint",
    [
        ("arena_gb = 1", [], "unknown field `arena_gb` (did you mean 'arena_gib'?)"),
        ("", ["--arena-gib", "-1"], "the command line: Expected `float` >= 0.0 - at `$.arena_gib`"),
        ("", ["--arena-gib", "1000000"], "set arena_gib to at most"),
        ("", ["--store", ""], "--store is empty, expected a directory"),
        ("", ["--store", "disk", "--store-option", "path"], "--store-option 'path' should be KEY=VALUE"),
        ("", ["--endpoint", "udp://x"], "listen[0].endpoint = 'udp://x': the transport 'zmq'"),
        ('metrics = "here"', [], "metrics = 'here' should be HOST:PORT"),
        ('[store]\nname = "dsk"', [], "did you mean 'disk'?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, text, flags, complaint):
    file = tmp_path / "hub.toml"
    file.write_text(text)
    small = ["--endpoint", f"ipc://{tmp_path}/hub.sock", "--arena-gib", "0.001"]
    assert main(["serve", "--config", str(file), *small, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and complaint in error and error.count("\n") == 1


def test_the_default_socket_is_in_a_directory_that_only_its_user_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "blendhub"
    assert default_endpoint() == default_endpoint() == f"ipc://{folder}/hub.sock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(HubError, match="with mode 770"):
        default_endpoint()
    folder.chmod(0o700)
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        with pytest.raises(HubError, match=f"only uid {folder.stat().st_uid + 1} can enter"):
            default_endpoint()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    with pytest.raises(HubError, match="cannot make the directory"):
        default_endpoint()
