"""What is particular to the disk store: its lock, its leftovers, its options, and files of others in its place."""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blendhub_stores.file_format import FORMAT, MAGIC

from blendhub import PluginHost
from blendhub.contracts import Store
from blendhub.core.errors import StoreFailed
from blendhub.testing.stores.base import chunk, content, key, listed, loaded, run

HOST = PluginHost.discover()


def disk(path: Path, **options: object) -> Any:
    return HOST.create("store", "disk", {"path": str(path), "capacity_gib": 0.001, **options})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = disk(path)
    for name in ("a", "b"):
        store.save_run(run(name))
        store.save(key(name), chunk(0), [content(0)])
    yield store
    store.close()


def files(path: Path) -> set[str]:
    return {file.name for file in path.rglob("*") if file.is_file()}


def test_leftovers_of_a_crash_are_removed_at_open_and_names_that_are_almost_its_own_left_alone(store, path):
    """Drafts, and a run that got no chunk before the crash."""
    whole, held = files(path), store.nbytes
    assert held == sum(file.stat().st_size for file in path.glob("*/*"))
    assert not any(stat.S_IMODE(file.stat().st_mode) & 0o077 for file in [path, *path.rglob("*")]), "others can read it"
    store.save_run(run("c"))
    store.close()
    for file in list(path.glob("*/*")):
        file.with_name(f"{file.name}.0123456789abcdef.tmp").write_bytes(b"half of it")
    digest = next(path.glob("*/*.run")).stem
    ends = ("-16-0.kv", "-016-32.kv", "-0-x.kv", ".kv", ".run.bak", "-0-16.kv.tmp")
    strangers = [path / digest[:2] / f"{digest}{end}" for end in ends]
    for stranger in strangers:
        stranger.write_bytes(b"a stranger's")
    with contextlib.closing(disk(path)) as again:
        assert {stranger.read_bytes() for stranger in strangers} == {b"a stranger's"}
        assert files(path) - {stranger.name for stranger in strangers} == whole
        assert (again.nbytes, again.corrupted) == (held, 0)


@pytest.mark.parametrize("end", [".kv", ".run"])
def test_a_chunk_whose_file_cannot_be_removed_is_not_discarded(store, path, monkeypatch, end):
    unlink = os.unlink

    def refuse(path: str) -> None:
        if path.endswith(end):
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(path)

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "unlink", refuse)
        with pytest.raises(StoreFailed, match="Read-only"):
            store.discard(key("a"), chunk(0))
    assert len(list(path.rglob("*.run"))) == 2
    store.discard(key("a"), chunk(0))
    store.discard(key("a"), chunk(0))  # discarding what is not there is fine
    assert len(files(path)) == 3


def test_a_chunk_whose_run_is_lost_or_of_another_format_is_removed_and_the_log_says_so(store, path, caplog):
    store.close()
    lost, other = (Path(store._directory.file_of((key(name), None))) for name in ("a", "b"))
    lost.unlink()
    bytes_of_other = bytearray(other.read_bytes())
    bytes_of_other[len(MAGIC)] = FORMAT + 1
    other.write_bytes(bytes_of_other)
    with caplog.at_level(logging.WARNING), contextlib.closing(disk(path)) as again:
        assert (listed(again), again.nbytes, again.corrupted) == ({}, 0, 3)
    assert f"it has format {FORMAT + 1}, this release reads format {FORMAT}" in caplog.text
    assert files(path) == {"lock"}


def test_its_place(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_bytes(b"")
    for place in ("file", "file/below"):
        with pytest.raises(StoreFailed, match=f"{tmp_path}/{place}.*another path"):
            disk(tmp_path / place)
    with caplog.at_level(logging.WARNING):
        disk(tmp_path / "large", capacity_gib=2.0**30).close()
    assert "capacity_gib" in caplog.text, "more than the disk has"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    HOST.create("store", "disk").close()
    assert (tmp_path / "cache" / "blendhub" / "disk" / "lock").exists()


def as_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def as_a_link(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def as_anothers(file: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(file, 12345, 12345)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("span", [None, chunk(0)], ids=["tokens", "chunk"])
@pytest.mark.parametrize("change", [as_a_fifo, as_a_link, as_anothers])
def test_a_file_that_is_not_a_regular_one_of_this_user_is_named_and_skipped(store, path, caplog, span, change):
    file = Path(store._directory.file_of((key("a"), span)))
    change(file)
    if change is as_a_fifo and span:
        with pytest.raises(StoreFailed, match="not a regular file"):
            loaded(store, key("a"), span)
    store.close()
    with caplog.at_level(logging.WARNING), contextlib.closing(disk(path)) as again:
        assert {key: list(run.chunks) for key, run in listed(again).items()} == {key("b"): [chunk(0)]}
        assert f"skipped {file}" in caplog.text
        assert file.exists(), "what another has put there is not removed"
        again.save_run(run("a"))
        again.save(key("a"), chunk(0), [content(1)])
        assert loaded(again, key("a"), chunk(0)) == [content(1)]
