"""Ends the wait of a thread that polls sockets."""

import os


class Wakeup:
    """A descriptor that becomes readable when any thread calls ``notify``, and stays so until ``reset``."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def notify(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def reset(self) -> None:
        """Only after ``descriptor`` became readable."""
        os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)
