"""`blendhub keys`."""

import stat

from blendhub.cli import main


def test_keys_are_their_owners_alone_and_never_overwritten(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {str(file.relative_to(folder)) for file in files} == {
        "server.secret", "client.secret", "server.public", "clients/client.public"
    }  # fmt: skip
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    printed = capsys.readouterr().out
    assert all(str(file) in printed for file in files)
    kept = {file: file.read_bytes() for file in files}
    assert main(["keys", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and "never overwritten" in error and error.count("\n") == 1
    assert {file: file.read_bytes() for file in files} == kept


def test_keys_have_a_default_place(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["keys"]) == 0
    assert (tmp_path / "blendhub" / "keys" / "server.secret").exists()


def test_keys_that_cannot_be_made_are_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments, complaint in (
        ([str(tmp_path / "file" / "keys")], "cannot write keys to"),
        ([str(tmp_path), "--transport", "inproc"], "this transport needs no keys"),
        ([str(tmp_path), "--transport", "pigeon"], "'pigeon'"),
    ):
        assert main(["keys", *arguments]) == 2
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1
