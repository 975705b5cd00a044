"""A file system that can hang: a directory that is mounted at another place, by a process that can be stopped."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from harness.waiting import Closing, wait_until

BINARY = shutil.which("bindfs")
MISSING = "no bindfs here, or no FUSE; install it with: apt-get install bindfs"
START_S = 10.0


class Mount(Closing):
    """``place`` shows what is in ``behind`` as long as the process of the mount answers."""

    def __init__(self, behind: Path, place: Path, *options: str) -> None:
        self.place = place
        for folder in (behind, place):
            folder.mkdir()
        self._process = subprocess.Popen([BINARY or "bindfs", "-f", *options, str(behind), str(place)])
        try:
            wait_until(lambda: os.path.ismount(place), START_S, every_s=0.02)
        except AssertionError as error:
            self._process.kill()
            raise OSError(f"bindfs did not mount {place}: exit code {self._process.wait()}") from error

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Calls that hang fail now."""
        self._process.kill()
        self._process.wait()
        unmount = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
        subprocess.run([*unmount, str(self.place)], check=False, capture_output=True)
