"""A suite that nothing fails is worth nothing: stores with one fault each, and the test that must see it."""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from blendhub_stores.disk import DiskStore
from blendhub_stores.options import DiskOptions

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span
from blendhub.testing import StoreSuite
from tests.suite_runs import passes

pytestmark = pytest.mark.slow


class Sound(DiskStore):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(DiskOptions(path=str(path), capacity_gib=capacity / 2**30))
        self.saved: dict[tuple[RunKey, Span], bytes | None] = {}

    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        self.saved[run, span] = None
        return super().save(run, span, shards)


class LoadsWhatItDoesNotHave(Sound):
    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        return super().load(run, span, into) or True


class ServesWhatIsDamaged(Sound):
    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        return super().load(run, span, into) or (run, span) in self.saved


class KeepsOneShard(Sound):
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        return super().save(run, span, [shards[0]] * len(shards))


class ForgetsItsPlace(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path / secrets.token_hex(8), capacity)


class ForgetsToForget(Sound):
    def discard(self, run: RunKey, span: Span) -> None:
        self._check_open()


class SaysNothingOfWhatItDrops(Sound):
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        return super().save(run, span, shards)[:0]


class HoldsMoreThanItMay(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, 2 * capacity)

    @property
    def capacity(self) -> int:
        return super().capacity // 2


class TakesNoLoadForAUse(Sound):
    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        return self._use((run, span), lambda file: file.fill(into)) is not None


class TakesChunksOfUnknownRuns(Sound):
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        if self._catalogue.n_tokens(run) is None:
            self.save_run(StoredRun(run, bytes(4 * span.end), b"", ()))
        return super().save(run, span, shards)


class ListsRunsWithoutChunks(Sound):
    def runs(self) -> Iterator[StoredRun]:
        empty = [key for key in self._catalogue if not self._catalogue.chunks(key)]
        return iter([*super().runs(), *(StoredRun(key, b"", b"", ()) for key in empty)])


class AnswersAfterItWasClosed(Sound):
    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        try:
            return super().load(run, span, into)
        except StoreFailed:
            return False


FAULTS = [
    (LoadsWhatItDoesNotHave, "test_any_history_in_a_roomy_store"),
    (ServesWhatIsDamaged, "test_a_damaged_chunk_is_never_served"),
    (ServesWhatIsDamaged, "test_swapped_files_are_not_served"),
    (KeepsOneShard, "test_bytes_come_back_as_they_were_saved"),
    (ForgetsItsPlace, "test_the_catalogue_survives_a_restart"),
    (ForgetsItsPlace, "test_a_place_in_use_is_refused"),
    (ForgetsToForget, "test_a_discarded_chunk_is_gone_for_good_and_a_run_with_its_last_one"),
    (SaysNothingOfWhatItDrops, "test_the_longest_unused_is_dropped_and_reported"),
    (HoldsMoreThanItMay, "test_a_large_chunk_drops_several"),
    (TakesNoLoadForAUse, "test_loading_and_saving_again_are_uses"),
    (TakesChunksOfUnknownRuns, "test_bad_input_is_refused_and_changes_nothing"),
    (ListsRunsWithoutChunks, "test_the_catalogue_survives_a_restart"),
    (AnswersAfterItWasClosed, "test_a_closed_store_says_so"),
]


def suite_of(fault: str) -> type[StoreSuite]:
    class Suite(StoreSuite):
        def create(self, path: Path, capacity: int) -> Store:
            return globals()[fault](path, capacity)

    return Suite


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[Sound], test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """All of these tests: plugins/stores runs the whole suite."""
    assert passes(__name__, "Sound", "test_bad_input_is_refused_and_changes_nothing", tmp_path)
