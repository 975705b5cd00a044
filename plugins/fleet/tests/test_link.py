"""Redis by URL: with a password, with TLS, and wrong."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from blendhub_fleet.directory import open_store
from blendhub_fleet.options import DirectoryOptions

from blendhub.core.errors import OptionError, StoreFailed
from harness.servers.redis_server import RedisServer, needs_redis
from harness.waiting import free_port

pytestmark = needs_redis


def opened(url: str, path: Path, **options: Any):
    return open_store(DirectoryOptions(catalogue=url, path=str(path), deadline_s=10.0, **options))


def test_a_password_is_part_of_the_url_and_never_of_an_error(tmp_path: Path) -> None:
    with RedisServer("--requirepass", "sesame") as server:
        url = server.url.replace("unix://", "unix://:{}@")
        right, wrong = (opened(url.format(word), tmp_path) for word in ("sesame", "guessed"))
        assert list(right.runs()) == []
        with pytest.raises(StoreFailed) as refused:
            wrong.snapshot()
        assert "sesame" not in str(refused.value) and "guessed" not in str(refused.value)
        for store in (right, wrong):
            store.close()


def test_tls_by_url(tmp_path: Path) -> None:
    port = free_port()
    certificate, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {secret} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(secret), "--tls-ca-cert-file", str(certificate))
    with RedisServer("--tls-port", str(port), "--tls-auth-clients", "no", *files):
        trusting = opened(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}", tmp_path)
        assert list(trusting.runs()) == []
        trusting.close()
        doubting = opened(f"rediss://127.0.0.1:{port}", tmp_path)
        with pytest.raises(StoreFailed, match="certificate"):
            doubting.snapshot()
        doubting.close()


def test_options_that_cannot_work_are_refused_at_once(tmp_path: Path) -> None:
    for url in ("", "HOST:6379", "http://HOST", "redis://HOST:port"):
        with pytest.raises(OptionError, match="catalogue"):
            opened(url, tmp_path)
    with pytest.raises(OptionError, match="needs path"):
        open_store(DirectoryOptions())
    with pytest.raises(OptionError, match="unix_group: this machine has no group 'nosuch'"):
        open_store(DirectoryOptions(path="/mnt/kv", unix_group="nosuch"))
