"""Copies of tensors from the model's device to the CPU."""

from typing import Any

import numpy.typing as npt
import torch


class HostCopy:
    """A tensor that is copied to the CPU. Nothing here waits for the device."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._arrival = numbers, None
        if numbers.device.type != "cpu":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrival = torch.get_device_module(numbers.device).Event()
            self._arrival.record()

    def numbers(self) -> npt.NDArray[Any] | None:
        """The numbers that have arrived; None while the copy is under way."""
        if self._arrival and not self._arrival.query():
            return None
        return self._host.numpy()
