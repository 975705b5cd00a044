"""What all parts of the store suite share: fixtures that open a store, and runs and chunks to put in it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import pytest

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options

ROOMY = 2**30
CHUNK_TOKENS = 16
SHARD_BYTES = 4096
Open: TypeAlias = Callable[..., Store]


def content(seed: int, size: int = SHARD_BYTES) -> bytes:
    """Bytes that no other seed gives."""
    return np.random.default_rng(seed).bytes(size)


def key(name: object, namespace: str = "5eed") -> RunKey:
    return RunKey(namespace, f"run-{name}")


def run(name: object, n_chunks: int = 8, *, namespace: str = "5eed") -> StoredRun:
    """A run with tokens for some chunks, none of which is stored yet."""
    tokens = np.random.default_rng([*f"{namespace} {name}".encode()]).bytes(4 * CHUNK_TOKENS * n_chunks)
    return StoredRun(key(name, namespace), tokens, f"about {name}".encode(), ())


def chunk(index: int) -> Span:
    return Span(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)


def loaded(store: Store, run: RunKey, span: Span, sizes: tuple[int, ...] = (SHARD_BYTES,)) -> list[bytes] | None:
    """The shards of a chunk, or None if the store says that it has none."""
    buffers = [bytearray(content(99, size)) for size in sizes]
    is_there = store.load(run, span, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers] if is_there else None


def listed(store: Store) -> dict[RunKey, StoredRun]:
    runs = list(store.runs())
    by_key = {run.key: run for run in runs}
    assert len(by_key) == len(runs), "runs() names a run twice"
    return by_key


def now_and_reopened(store: Store, open: Open) -> Iterator[Store]:
    """The store twice: as it is open, and reopened."""
    yield store
    yield open(store.capacity)


class StoreTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` opens the store under test."""

    contract: ClassVar[type] = Store

    capabilities: ClassVar[tuple[str, ...]] = ()
    """What its ``PluginSpec`` says; see :class:`blendhub.contracts.Store`."""

    @abstractmethod
    def create(self, path: Path, capacity: int) -> Store:
        """A store of that many bytes at that path; a path opened before holds what was stored there."""

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type[Self]:
        """The suite of an installed store; raises if it cannot be created with these options."""

        def create(suite: object, path: Path, capacity: int) -> Any:
            return host.create("store", name, {**options, **cls.options_for(path, capacity)})

        spec = host.spec("store", name)
        parse_options(f"store {name!r}", spec.options, {**options, **cls.options_for(Path(), 1)})
        return type("TestInstalledStore", (cls,), {"create": create, "capabilities": spec.capabilities})

    @classmethod
    def options_for(cls, path: Path, capacity: int) -> dict[str, Any]:
        """The options that open an installed store as ``create`` would."""
        return {"path": str(path), "capacity_gib": capacity / 2**30}

    def files_with(self, path: Path, wanted: bytes) -> list[Path]:
        """The files of the store at ``path`` that hold these bytes, for tests that damage them or make writes fail.

        A store whose files are compressed or elsewhere overrides it.
        """
        if "no_files" in self.capabilities:
            pytest.skip("the store says no_files, so the suite neither damages files nor makes writes of them fail")
        return [file for file in path.rglob("*") if file.is_file() and wanted in file.read_bytes()]

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    @pytest.fixture
    def open(self, path: Path) -> Iterator[Open]:
        """Opens the store of this test; calling it again reopens the store."""
        opened: list[Store] = []

        def reopen(capacity: int = ROOMY) -> Store:
            for store in opened:
                store.close()
            opened.append(self.create(path, capacity))
            return opened[-1]

        yield reopen
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open: Open) -> Store:
        return open()
