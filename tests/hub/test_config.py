"""The configuration of a hub."""

import pytest

from blendhub.core.errors import OptionError
from blendhub.hub.config import HubConfig, Listen, StoreChoice, as_toml, load_config


@pytest.mark.parametrize(
    "config",
    [
        HubConfig(),
        HubConfig(
            listen=(Listen(endpoint="ipc:///x/y", options={"a": [1, True], "b": "c"}), Listen(endpoint="ipc:///z")),
            store=StoreChoice(options={"path": 'a "quoted" path'}),
            arena_gib=1.5,
        ),
    ],
)
def test_what_is_printed_is_read_back(config, tmp_path):
    path = tmp_path / "hub.toml"
    path.write_text(as_toml(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("arena_gb = 1", r"unknown field `arena_gb` \(did you mean 'arena_gib'\?\)"),
        ("[[listen]]\nendpont = 'x'", r"unknown field `endpont` - at `\$.listen\[0\]`"),
        ("arena_gib =", "is not TOML"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(text, complaint, tmp_path):
    path = tmp_path / "hub.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=complaint) as raised:
        load_config(path)
    assert str(path) in str(raised.value)
