"""Kernels use host addresses only where the driver says that they may."""

import ctypes

import pytest
import torch
from blendhub_cuda.runtime import kernels_use_host_addresses


class Driver:
    """``libcuda``, and ``libamdhip64``, which have the attribute under other numbers."""

    def __init__(self, value=1, status=0):
        self.value, self.status, self.asked = value, status, []

    def cuDeviceGetAttribute(self, answer, attribute, device):
        self.asked.append((attribute, device))
        answer._obj.value = self.value
        return self.status

    hipDeviceGetAttribute = cuDeviceGetAttribute


@pytest.mark.parametrize("hip, attribute", [(None, 91), ("6.4", 4)])
def test_the_driver_is_asked(monkeypatch, hip, attribute):
    monkeypatch.setattr(torch.version, "hip", hip)
    for value, status, expected in ((1, 0, True), (0, 0, False), (1, 101, False)):
        driver = Driver(value, status)
        assert kernels_use_host_addresses(torch.device("cuda", 2), lambda name, driver=driver: driver) is expected
        assert driver.asked == [(attribute, 2)]


@pytest.mark.parametrize("load", [lambda name: object(), lambda name: ctypes.CDLL("lib-not-there.so")])
def test_a_driver_that_does_not_answer_means_no(load):
    assert not kernels_use_host_addresses(torch.device("cuda", 2), load)
