"""The bytes of chunks in Mooncake Store, copied by a process that is started again whenever it ends."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from blendhub_fleet.bytes import ByteStore, Extent
from blendhub_fleet.store import FleetStore

from blendhub.contracts import ArenaFile
from blendhub.core.errors import InvalidInput, StoreAway, StoreFailed
from blendhub_mooncake.codes import MASTER_IS_AWAY, CodeMeaning, of_get, of_put
from blendhub_mooncake.frames import Call, ChildSetup
from blendhub_mooncake.options import MooncakeOptions
from blendhub_mooncake.process import MooncakeProcess

log = logging.getLogger(__name__)
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
COUNTERS = (
    *("starts", "put_keys", "put_absent", "put_failures"),
    *("get_keys", "get_absent", "get_failures", "remove_failures"),
)
"""Processes that started; and of each call the keys that were done, those that had no room or were gone, and how often
it failed as a whole."""


class MooncakeBytes(ByteStore):
    """Bytes under keys, from and into the arena; the hub's own process never imports Mooncake.

    Mooncake's faults stay in the process that calls it. One that crashes, does not answer by the deadline, or may
    still be transferring after it answered, is killed, and every call that it had fails; calls fail at once until the
    next process has started. When a call has ended, nothing reads or writes what it named in the arena any more.
    """

    def __init__(self, setup: ChildSetup, deadline_s: float) -> None:
        self._setup, self._deadline_s = setup, deadline_s
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._changed = threading.Condition()
        """Guards the fields above and below, all but the settings."""
        self._process: MooncakeProcess | None = None
        self._is_ready = self._is_closed = False
        self._reason = ""
        """Why there is no process that is ready; empty while the first one starts."""
        # The kernel kills the process when the thread that started it ends: this one lives as long as the process.
        self._keeper = threading.Thread(target=self._keep, name="blendhub-mooncake", daemon=True)
        self._keeper.start()

    def put(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        """Whether each key is stored now. False: there is no room. Raises StoreFailed if that is not known."""
        return self._transfer(Call("put", keys, extents), [of_put] * len(keys))

    def get(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        """Fill the extents. False: Mooncake does not have it. Raises StoreFailed if that is not known.

        What an extent holds then, or where the answer is False, is undefined.
        """
        return self._transfer(Call("get", keys, extents), [partial(of_get, length=length) for _, length in extents])

    def remove(self, keys: list[str]) -> None:
        """Remove keys, except those that are being read: Mooncake drops them when it needs the room."""
        self._call(Call("remove", keys, []))

    def stats(self) -> dict[str, float]:
        with self._changed:
            return {f"mooncake_{name}": float(count) for name, count in self._counts.items()}

    def close(self) -> None:
        """Have the process end. Closing twice is fine."""
        with self._changed:
            timeout_s = END_TIMEOUT_S if self._is_ready else 0
            self._is_closed, self._is_ready, self._reason = True, False, "it is closed"
            self._changed.notify_all()
            process = self._process
        if process:
            process.end(timeout_s)
        self._keeper.join()
        with self._changed:
            self._process = None

    def _transfer(self, call: Call, outcome_of: list[Callable[[int], CodeMeaning]]) -> list[bool]:
        if len(call.keys) != len(call.extents) or len(set(call.keys)) != len(call.keys):
            raise InvalidInput(f"{call.what} needs distinct keys and one extent for each, got {call}")
        size = self._setup.arena.size
        for offset, length in call.extents:
            if not 0 <= offset < offset + length <= size:
                raise InvalidInput(f"[{offset}, {offset + length}) is empty or not inside an arena of {size} bytes")
        process, codes = self._call(call)
        outcomes = [judge(code) for judge, code in zip(outcome_of, codes, strict=True)]
        if CodeMeaning.ADRIFT in outcomes:
            process.kill(f"a transfer of a {call.what} may still be under way after its answer")
        failed = [code for code, outcome in zip(codes, outcomes, strict=True) if not outcome.is_certain]
        if failed:
            kind = StoreAway if MASTER_IS_AWAY.issuperset(failed) else StoreFailed
            raise self._failure(call, f"{len(failed)} of its keys failed, the first with code {failed[0]}", kind)
        done = [outcome is CodeMeaning.DONE for outcome in outcomes]
        with self._changed:
            self._counts[f"{call.what}_keys"] += sum(done)
            self._counts[f"{call.what}_absent"] += len(done) - sum(done)
        return done

    def _call(self, call: Call) -> tuple[MooncakeProcess, list[int]]:
        deadline = time.monotonic() + self._deadline_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._reason, self._deadline_s)
            process = self._process if self._is_ready else None
        if process is None:
            raise self._failure(call, self._reason or "its process has not started yet", StoreAway)
        try:
            return process, process.call(call, deadline)
        except StoreFailed as error:
            raise self._failure(call, str(error), StoreAway) from error

    def _failure(self, call: Call, reason: str, kind: type[StoreFailed] = StoreFailed) -> StoreFailed:
        with self._changed:
            self._counts[f"{call.what}_failures"] += 1
        return kind(f"Mooncake could not {call.what} {len(call.keys)} keys: {reason}")

    def _keep(self) -> None:
        """Have a process at all times, until this is closed."""
        pause = FIRST_PAUSE_S
        while True:
            since = time.monotonic()
            try:
                reason = self._run_one()
            except (OSError, StoreFailed) as error:
                reason = str(error)
            with self._changed:
                if self._is_closed:
                    return
                if reason != self._reason:
                    log.warning("Mooncake is away, so chunks are neither sent to it nor fetched: %s", reason)
                self._process, self._is_ready, self._reason = None, False, reason
                # One that served for a while is replaced at once.
                lived = time.monotonic() - since
                pause = FIRST_PAUSE_S if lived > 2 * LONGEST_PAUSE_S else min(2 * pause, LONGEST_PAUSE_S)
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._is_closed, pause):
                    return

    def _run_one(self) -> str:
        """Start a process and wait for its end; returns the reason of that."""
        process = MooncakeProcess()
        with self._changed:
            self._process = process
            if self._is_closed:
                process.kill("it is closed")
        try:
            process.start(self._setup, START_TIMEOUT_S)
            with self._changed:
                self._is_ready, self._reason = not self._is_closed, ""
                self._counts["starts"] += 1
                self._changed.notify_all()
        finally:
            reason = process.wait()
        return reason


def open_store(options: MooncakeOptions) -> FleetStore:
    def open_bytes(arena: ArenaFile) -> MooncakeBytes:
        setup = ChildSetup(arena, options.master, options.address, options.metadata, options.protocol, options.devices)
        return MooncakeBytes(setup, options.transfer_deadline_s)

    return FleetStore(options, open_bytes)
