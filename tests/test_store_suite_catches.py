"""Stores with one fault each, and the test of the suite that must see it."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blendhub_stores.disk import DiskStore
from blendhub_stores.options import DiskOptions

from blendhub.contracts import Store, StoredRun
from blendhub.testing import StoreSuite
from tests.suite_runs import proofs

pytestmark = pytest.mark.slow


class Sound(DiskStore):
    _catalogue: Any
    _directory: Any

    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(DiskOptions(path=str(path), capacity_gib=capacity / 2**30))


def faulty(**changed: Any) -> type[Sound]:
    return type("Faulty", (Sound,), changed)


def opening(change: Callable[[Any], Any]) -> Callable[..., Store]:
    """``change`` is called with the store when it is open."""

    def opened(suite: object, path: Path, capacity: int) -> Store:
        store = Sound(path, capacity)
        change(store)
        return store

    return opened


def writes_in_place(store: Any) -> None:
    directory, draft_of = store._directory, store._directory.draft_of

    @contextmanager
    def file_itself(entry: Any) -> Iterator[str]:
        with draft_of(entry):
            file = directory.file_of(entry)
            Path(file).unlink(missing_ok=True)
            yield file

    directory.draft_of = file_itself


def drops_the_run_that_grows(store: Any) -> None:
    discard = store._catalogue.discard
    store._catalogue.discard = lambda entry, keep=None: discard(entry)


class HoldsMoreThanItMay(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, 2 * capacity)

    @property
    def capacity(self) -> int:
        return super().capacity // 2


def keeps_the_first_version(self: Sound, run: StoredRun) -> Any:
    return [] if self._catalogue.n_tokens(run.key) else Sound.save_run(self, run)


def takes_chunks_of_unknown_runs(self: Sound, run: Any, span: Any, shards: Any) -> Any:
    if self._catalogue.n_tokens(run) is None:
        self.save_run(StoredRun(run, bytes(4 * span.end), b"", ()))
    return Sound.save(self, run, span, shards)


class ServesWhatIsDamaged(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, capacity)
        self.saved = set[Any]()

    def save(self, run: Any, span: Any, shards: Any) -> Any:
        self.saved.add((run, span))
        return super().save(run, span, shards)

    def load(self, run: Any, span: Any, into: Any) -> bool:
        return super().load(run, span, into) or (run, span) in self.saved


def lets_others_in(store: Any) -> None:
    (store._directory.path / "lock").unlink()


FAULTS: dict[str, list[Callable[..., Store]]] = {
    "test_bytes_come_back_as_they_were_saved": [
        faulty(save=lambda self, run, span, shards: Sound.save(self, run, span, [shards[0]] * len(shards))),
    ],
    "test_growing_a_run_may_cost_its_own_chunks_but_not_the_run": [opening(drops_the_run_that_grows)],
    "test_bad_input_is_refused_and_changes_nothing": [faulty(save=takes_chunks_of_unknown_runs)],
    "test_a_place_in_use_is_refused": [opening(lets_others_in)],
    "test_a_damaged_chunk_is_never_served": [ServesWhatIsDamaged],
    "test_a_killed_writer_leaves_chunks_whole_or_absent": [opening(writes_in_place)],
    "test_threads_on_the_same_chunks_see_them_whole": [opening(writes_in_place)],
    "test_any_history": [
        faulty(discard=lambda self, run, span: self._check_open()),
        faulty(save=lambda self, run, span, shards: Sound.save(self, run, span, shards)[:0]),
        faulty(load=lambda self, *chunk: self._use(chunk[:2], lambda file: file.fill(chunk[2])) is not None),
        faulty(save_run=keeps_the_first_version),
        HoldsMoreThanItMay,
        lambda suite, path, capacity: Sound(path / secrets.token_hex(8), capacity),
    ],
}


globals().update(proofs(StoreSuite, FAULTS))  # plugins/stores tests that it passes without a fault
