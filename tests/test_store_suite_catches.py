"""A suite that nothing fails is worth nothing: stores with one fault each, and the test that must see it."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blendhub_stores.disk import DiskStore
from blendhub_stores.options import DiskOptions
from msgspec.structs import replace

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span
from blendhub.testing import StoreSuite
from tests.suite_runs import all_tests, passes

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


class WritesInPlace(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, capacity)
        directory: Any = self._directory
        draft_of = directory.draft_of

        @contextmanager
        def file_itself(entry: Any) -> Iterator[str]:
            with draft_of(entry):
                file = directory.file_of(entry)
                Path(file).unlink(missing_ok=True)
                yield file

        directory.draft_of = file_itself


class ListsTheChunksItWasGiven(Sound):
    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        self.given = run.chunks
        return super().save_run(run)

    def runs(self) -> Iterator[StoredRun]:
        return (replace(run, chunks=self.given or run.chunks) for run in super().runs())


class KeepsTheFirstVersion(Sound):
    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        return [] if self._catalogue.n_tokens(run.key) else super().save_run(run)


class NamesFilesAsRuns(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, capacity)
        directory: Any = self._directory
        directory.file_of = lambda entry: f"{path}/{entry[0].run}-{entry[1]}"


class ForgetsTheOrderOfUse(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, capacity)
        for entry in reversed(list(self._catalogue._longest_unused_first)):
            self._catalogue.touch(entry)


class DropsTheRunThatGrows(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, capacity)
        catalogue: Any = self._catalogue
        discard = catalogue.discard
        catalogue.discard = lambda entry, keep=None: discard(entry)


class KeepsRunsWithoutChunks(Sound):
    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        dropped = super().save_run(run)
        self._catalogue._longest_unused_first.pop((run.key, None), None)
        return dropped


class DropsAllForWhatCannotFit(Sound):
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        if sum(map(len, shards)) >= self.capacity:
            for chunk in self._catalogue.chunks(run):
                self.discard(run, chunk)
        return super().save(run, span, shards)


class KeepsWhatASmallerOneMayNot(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(path, 2 * capacity)
        self._catalogue.capacity = capacity


class DropsTheTokensAlone(Sound):
    def _drop_damaged(self, entry: Any, version: Any, error: Exception) -> None:
        if entry[1] is None:
            self._corrupted += 1
        else:
            super()._drop_damaged(entry, version, error)


class RemovesFilesOfOthers(Sound):
    def __init__(self, path: Path, capacity: int) -> None:
        for file in path.rglob("*.*"):
            if file.is_file() and file.suffix not in (".run", ".kv"):
                file.unlink()
        super().__init__(path, capacity)


class FailsWhenClosedTwice(Sound):
    def close(self) -> None:
        self._check_open()
        super().close()


class ClosesAtOnce(Sound):
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._directory.close()


FAULTS = [
    (WritesInPlace, "test_a_killed_writer_leaves_chunks_whole_or_absent"),
    (WritesInPlace, "test_a_write_that_fails_changes_nothing_else"),
    (WritesInPlace, "test_threads_on_the_same_chunks_see_them_whole"),
    (ListsTheChunksItWasGiven, "test_the_chunks_given_with_a_run_are_ignored"),
    (KeepsTheFirstVersion, "test_saving_a_run_again_replaces_it_and_keeps_its_chunks"),
    (NamesFilesAsRuns, "test_names_do_not_lead_out_of_the_store"),
    (ForgetsTheOrderOfUse, "test_the_order_of_use_survives_a_restart"),
    (DropsTheRunThatGrows, "test_growing_a_run_may_cost_its_own_chunks_but_not_the_run"),
    (KeepsRunsWithoutChunks, "test_runs_without_chunks_do_not_fill_the_store"),
    (DropsAllForWhatCannotFit, "test_what_can_never_fit_is_refused_and_changes_nothing"),
    (KeepsWhatASmallerOneMayNot, "test_a_smaller_capacity_is_kept_from_the_start"),
    (ServesWhatIsDamaged, "test_no_flipped_bit_and_no_missing_end_escapes"),
    (ServesWhatIsDamaged, "test_a_missing_file_is_not_served"),
    (DropsTheTokensAlone, "test_a_run_with_damaged_tokens_goes_with_its_chunks"),
    (RemovesFilesOfOthers, "test_files_of_others_are_left_alone"),
    (SaysNothingOfWhatItDrops, "test_any_history_in_a_tight_store"),
    (FailsWhenClosedTwice, "test_closing_twice_is_fine"),
    (HoldsMoreThanItMay, "test_threads_in_a_store_too_small_for_them"),
    (ClosesAtOnce, "test_closing_waits_for_saves_under_way"),
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


def test_a_faulty_store_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(StoreSuite)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[Sound], test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """All of these tests: plugins/stores runs the whole suite."""
    assert passes(__name__, "Sound", "test_bad_input_is_refused_and_changes_nothing", tmp_path)
