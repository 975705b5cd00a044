"""The owner's end of one Mooncake process: its start, its lanes, and its end."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time

import msgspec

from blendhub.core.errors import StoreFailed
from blendhub_mooncake.frames import Call, ChildSetup, Codes, Started, receive, send

LANES = 4
"""Calls that are under way at the same time; others wait for a lane."""

QUIET = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
"""What Mooncake logs unless the environment says otherwise; it says much about each start."""


class MooncakeProcess:
    """A process that has the arena mapped.

    What a call names in the arena is safe to use for something else as soon as the call has ended: either the process
    has answered, or it is dead and reaped, so that it has neither the mapping nor a network connection any more.
    """

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + LANES)]
        theirs = [pair[1].fileno() for pair in pairs]
        with contextlib.ExitStack() as closing:
            for pair in pairs:
                closing.enter_context(pair[1])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "blendhub_mooncake.child", str(os.getpid()), *map(str, theirs)],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=2,  # Mooncake's remarks do not belong into the output of the hub
                # A Ctrl-C in a terminal is meant for the hub, which still needs the process while it ends.
                start_new_session=True,
                env=QUIET | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._control = pairs[0][0]
        self._killing = threading.Lock()
        self._reason = ""
        """The reason of the first kill."""
        self._lanes: queue.LifoQueue[socket.socket | None] = queue.LifoQueue()
        """The lanes that no call uses; with None among them, the process is dead."""
        for pair in pairs[1:]:
            self._lanes.put(pair[0])

    def start(self, setup: ChildSetup, timeout_s: float) -> None:
        """Wait until it can be called. Raises StoreFailed if it cannot, and then it is dead."""
        deadline = time.monotonic() + timeout_s
        try:
            send(self._control, setup, deadline)
            error = receive(self._control, Started, deadline).error
        except TimeoutError:
            error = f"it did not start in {timeout_s:g} s; is mooncake_master reachable at {setup.master}?"
        except (OSError, msgspec.MsgspecError):
            error = "it ended while it started"
        if error:
            raise StoreFailed(self.kill(error))

    def call(self, call: Call, deadline: float) -> list[int]:
        """Mooncake's code for each key. Raises StoreFailed if there is no answer by the deadline.

        It kills the process if it does not answer, and returns or raises when that is dead, which takes a few
        milliseconds, or as long as the kernel needs to end its transfers.
        """
        try:
            lane = self._lanes.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise StoreFailed(f"all {LANES} calls at a time were under way until its deadline") from None
        if lane is None:
            self._lanes.put(None)
            raise StoreFailed("its process has ended")
        try:
            send(lane, call, deadline)
            codes = receive(lane, Codes, deadline).codes
        except TimeoutError:
            raise StoreFailed(self.kill(f"it did not answer a {call.what} in time")) from None
        except Exception as error:  # whatever it is, the answer may still come, and is not the next call's
            raise StoreFailed(self.kill(f"it ended in a {call.what}")) from error
        finally:
            self._lanes.put(lane)
        if len(codes) != len(call.keys):
            raise StoreFailed(self.kill(f"it answered a {call.what} of {len(call.keys)} keys with {len(codes)} codes"))
        return codes

    def kill(self, reason: str) -> str:
        """Return when it is dead. Returns why it is: it may have been killed for another reason before."""
        with self._killing:
            self._reason = self._reason or reason
        self._process.kill()
        self._process.wait()
        return self._why()

    def wait(self) -> str:
        """Wait for its end, whatever the reason, and release the lanes. Returns the reason."""
        self._process.wait()
        self._control.close()
        for _ in range(LANES):
            lane = self._lanes.get()
            if lane is not None:
                lane.close()
        self._lanes.put(None)
        return self._why()

    def _why(self) -> str:
        return f"{self._reason or 'it ended'} (exit code {self._process.returncode})"

    def end(self, timeout_s: float) -> None:
        """Have it end by itself, or kill it after the timeout."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill("the hub ends, and it did not")
