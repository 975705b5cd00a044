"""The machine around BlendHub: files, locks, processes, default paths, and the versions of vLLM that are served.

A plugin may use the names below; what else the modules hold is BlendHub's own.
"""

from blendhub.system.default_paths import default_disk_store
from blendhub.system.memory import MADV_POPULATE_READ, MADV_POPULATE_WRITE, madvise
from blendhub.system.processes import let_others_run_first
from blendhub.system.recurring import RecurringWarnings
from blendhub.system.safe_open import NoFile, NotOurs, open_own

__all__ = [
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "NoFile",
    "NotOurs",
    "RecurringWarnings",
    "default_disk_store",
    "let_others_run_first",
    "madvise",
    "open_own",
]
