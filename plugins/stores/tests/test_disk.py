"""What is particular to the disk store: its lock, its leftovers, its options, and a disk that is really full."""

import contextlib
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
    store.save_run(run("a"))
    store.save(key("a"), chunk(0), [content(0)])
    yield store
    store.close()


def files(path: Path) -> set[str]:
    return {file.name for file in path.rglob("*") if file.is_file()}


def test_a_place_in_use_is_refused_naming_the_process(store: Store, path: Path) -> None:
    with pytest.raises(StoreFailed, match=f"pid {os.getpid()};"):
        disk(path)


def test_leftovers_of_a_crash_are_removed_at_open(store: Store, path: Path) -> None:
    """Drafts, and a run that got no chunk before the crash."""
    whole, held = files(path), store.nbytes
    store.save_run(run("b"))
    store.close()
    for file in list(path.glob("*/*")):
        file.with_name(f"{file.name}.0123456789abcdef.tmp").write_bytes(b"half of it")
    with contextlib.closing(disk(path)) as again:
        assert (files(path), again.nbytes, again.corrupted) == (whole, held, 0)


def test_a_chunk_whose_run_is_lost_is_removed_and_counted(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.close()
    next(path.glob("*/*.run")).unlink()
    with caplog.at_level(logging.WARNING), contextlib.closing(disk(path)) as again:
        assert (listed(again), again.nbytes, again.corrupted) == ({}, 0, 1)
    assert "tokens of its run are missing" in caplog.text
    assert files(path) == {"lock"}


def test_names_that_are_almost_its_own_are_left_alone(store: Store, path: Path) -> None:
    store.close()
    digest = next(path.glob("*/*.run")).stem
    ends = ("-16-0.kv", "-016-32.kv", "-0-x.kv", ".kv", ".run.bak", "-0-16.kv.tmp")
    strangers = [path / digest[:2] / f"{digest}{end}" for end in ends]
    for stranger in strangers:
        stranger.write_bytes(b"a stranger's")
    with contextlib.closing(disk(path)) as again:
        assert {stranger.read_bytes() for stranger in strangers} == {b"a stranger's"}
        assert (again.corrupted, listed(again)[key("a")].chunks) == (0, (chunk(0),))


def test_bytes_held_are_the_bytes_of_its_files(store: Store, path: Path) -> None:
    for index in range(1, 300):
        store.save_run(run(index))
        store.save(key(index), chunk(0), [content(index)])
        used = sum(file.stat().st_size for file in path.glob("*/*"))
        assert used == store.nbytes <= store.capacity


def test_only_its_user_can_read_it(store: Store, path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        assert not stat.S_IMODE(file.stat().st_mode) & 0o077, file


def test_the_default_place_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    HOST.create("store", "disk").close()
    assert (tmp_path / "cache" / "blendhub" / "disk" / "lock").exists()


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in ("file", "file/below"):
        with pytest.raises(StoreFailed, match=f"{tmp_path}/{place}.*another path"):
            disk(tmp_path / place)


def test_a_capacity_beyond_the_disk_is_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        disk(path, capacity_gib=2.0**30).close()
    assert "capacity_gib" in caplog.text


def a_store_with_two_runs(path: Path) -> tuple[Path, Path]:
    """Closed again; returns the files of one run: its tokens and its chunk."""
    with contextlib.closing(disk(path)) as store:
        for name in ("a", "b"):
            store.save_run(run(name))
            store.save(key(name), chunk(0), [content(0)])
        file = Path(store._directory.file_of((key("a"), None)))
        return file, Path(store._directory.file_of((key("a"), chunk(0))))


def chunks_of(store: Store) -> dict:
    return {key: list(run.chunks) for key, run in listed(store).items()}


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
@pytest.mark.parametrize("which", [0, 1], ids=["tokens", "chunk"])
@pytest.mark.parametrize("change", [as_a_fifo, as_a_link, as_anothers])
def test_a_file_that_is_not_a_regular_one_of_this_user_is_named_and_skipped(path, caplog, which, change):
    file = a_store_with_two_runs(path)[which]
    change(file)
    with caplog.at_level(logging.WARNING), contextlib.closing(disk(path)) as store:
        assert chunks_of(store) == {key("b"): [chunk(0)]}
        assert f"skipped {file}" in caplog.text
        assert file.exists(), "what another has put there is not removed"
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(1)])
        assert loaded(store, key("a"), chunk(0)) == [content(1)]


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_fifo_is_not_waited_for(path):
    _, file = a_store_with_two_runs(path)
    with contextlib.closing(disk(path)) as store:
        as_a_fifo(file)
        with pytest.raises(StoreFailed, match="not a regular file"):
            loaded(store, key("a"), chunk(0))


def test_a_folder_of_another_user_is_named_and_skipped(path, caplog):
    file, _ = a_store_with_two_runs(path)
    as_anothers(file.parent)
    with caplog.at_level(logging.WARNING), contextlib.closing(disk(path)) as store:
        assert key("a") not in listed(store) and f"skipped {file.parent}" in caplog.text


def test_a_file_of_another_format_is_removed_and_the_log_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, _ = a_store_with_two_runs(path)
    content = bytearray(file.read_bytes())
    content[len(MAGIC)] = FORMAT + 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING), contextlib.closing(disk(path)) as store:
        assert chunks_of(store) == {key("b"): [chunk(0)]} and not file.exists()
    assert f"it has format {FORMAT + 1}, this release reads format {FORMAT}" in caplog.text
