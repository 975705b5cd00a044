"""Which worker of pytest-xdist runs which tests."""

import zlib

from xdist.scheduler import LoadFileScheduling


class Scheduling(LoadFileScheduling):
    """A file's tests run in one worker, and every second worker starts vLLM's engines.

    An interpreter that has imported vLLM is forked for each engine, and belongs to its worker.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        if "/test_engine_" not in path:
            return path
        return f"engines {zlib.crc32(path.encode()) % max(1, self.numnodes // 2)}"
