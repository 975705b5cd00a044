"""Stores with one fault each, and the test of the suite that must see it."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blendhub_stores.disk import DiskStore
from blendhub_stores.options import DiskOptions

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span
from blendhub.testing import StoreSuite
from tests.suite_runs import all_tests, proofs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_shrinking")]


class Sound(DiskStore):
    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__(DiskOptions(path=str(path), capacity_gib=capacity / 2**30))
        self.saved: dict[tuple[RunKey, Span], bytes | None] = {}

    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        self.saved[run, span] = None
        return super().save(run, span, shards)


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


class ClosesAtOnce(Sound):
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._directory.close()


FAULTS = [
    (KeepsOneShard, "test_bytes_come_back_as_they_were_saved"),
    (KeepsTheFirstVersion, "test_saving_a_run_again_replaces_it_and_keeps_its_chunks"),
    (NamesFilesAsRuns, "test_names_do_not_lead_out_of_the_store"),
    (ForgetsToForget, "test_a_discarded_chunk_is_gone_for_good_and_a_run_with_its_last_one"),
    (TakesNoLoadForAUse, "test_loading_and_saving_again_are_uses"),
    (ForgetsTheOrderOfUse, "test_the_order_of_use_survives_a_restart"),
    (DropsTheRunThatGrows, "test_growing_a_run_may_cost_its_own_chunks_but_not_the_run"),
    (KeepsRunsWithoutChunks, "test_runs_without_chunks_do_not_fill_the_store"),
    (DropsAllForWhatCannotFit, "test_what_can_never_fit_is_refused_and_changes_nothing"),
    (KeepsWhatASmallerOneMayNot, "test_a_smaller_capacity_is_kept_from_the_start"),
    (TakesChunksOfUnknownRuns, "test_bad_input_is_refused_and_changes_nothing"),
    (AnswersAfterItWasClosed, "test_a_closed_store_says_so"),
    (ForgetsItsPlace, "test_a_place_in_use_is_refused"),
    (ServesWhatIsDamaged, "test_a_damaged_chunk_is_never_served"),
    (ServesWhatIsDamaged, "test_no_flipped_bit_and_no_missing_end_escapes"),
    (ServesWhatIsDamaged, "test_neither_swapped_files_nor_missing_ones_are_served"),
    (DropsTheTokensAlone, "test_a_run_with_damaged_tokens_goes_with_its_chunks"),
    (RemovesFilesOfOthers, "test_files_of_others_are_left_alone"),
    (WritesInPlace, "test_a_killed_writer_leaves_chunks_whole_or_absent"),
    (WritesInPlace, "test_a_write_that_fails_changes_nothing_else"),
    (WritesInPlace, "test_threads_on_the_same_chunks_see_them_whole"),
    (ClosesAtOnce, "test_closing_waits_for_saves_under_way"),
    *((faulty, "test_any_history") for faulty in (SaysNothingOfWhatItDrops, HoldsMoreThanItMay, ForgetsItsPlace)),
]


class Suite(StoreSuite):
    """That it passes without a fault, plugins/stores tests."""

    plugin: type[Sound] = Sound

    def create(self, path: Path, capacity: int) -> Store:
        return self.plugin(path, capacity)


globals().update(proofs(Suite, FAULTS))


def test_a_faulty_store_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(StoreSuite)
