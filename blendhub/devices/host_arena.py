"""The arena as a device with streams uses it."""

import logging
import warnings

import numpy as np
import numpy.typing as npt
import torch

from blendhub.devices.runtime import Runtime

log = logging.getLogger(__name__)


class HostArena:
    """An arena's bytes, page-locked if the machine allows it."""

    def __init__(self, arena: npt.NDArray[np.uint8], runtime: Runtime) -> None:
        self.bytes = arena
        self._runtime = runtime
        with warnings.catch_warnings():
            # torch has no read-only tensors; saves to such an arena are refused.
            warnings.simplefilter("ignore", UserWarning)
            self.tensor = torch.from_numpy(arena)
        error = runtime.register(arena)
        self.is_registered = error is None
        if error:
            log.warning(
                "the arena of %d MiB could not be pinned (%s), so KV takes the slower way through small buffers; %s",
                arena.size >> 20,
                error,
                runtime.pinning_advice,
            )

    def close(self) -> None:
        if self.is_registered:
            self._runtime.enter()
            self._runtime.unregister(self.bytes)
