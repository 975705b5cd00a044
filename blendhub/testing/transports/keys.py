"""The keys of transports that reach other machines."""

from pathlib import Path

import pytest

from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import TransportTests


@holds("Write keys for a server and its clients into ``directory``; existing files")
class KeyTests(TransportTests):
    def test_keys_are_private_and_never_overwritten(self, tmp_path: Path) -> None:
        transport = self.create()
        try:
            keys = transport.make_keys(tmp_path / "keys")
        except Unsupported:
            pytest.skip("this transport needs no keys")
        written = {file: file.read_bytes() for file in keys.files}
        assert written and keys.server_options and keys.client_options
        assert all(file.stat().st_mode & 0o077 == 0 for file in written), "others can read a key"
        with pytest.raises(InvalidInput):
            transport.make_keys(tmp_path / "keys")
        assert {file: file.read_bytes() for file in keys.files} == written
