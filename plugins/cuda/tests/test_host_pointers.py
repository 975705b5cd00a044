"""Kernels use host addresses only where the driver says that they may."""

import ctypes

import pytest
import torch
from blendhub_cuda.host_pointers import kernels_use_host_addresses

GPU = torch.device("cuda", 2)


class Driver:
    """``libcuda``, and ``libamdhip64``, which have the attribute under other numbers."""

    def __init__(self, value, status=0):
        self.answers = {91: value, 4: value}
        self.status = status
        self.asked = []

    def cuDeviceGetAttribute(self, answer, attribute, device):
        self.asked.append(("cuda", attribute, device))
        answer._obj.value = self.answers[attribute]
        return self.status

    def hipDeviceGetAttribute(self, answer, attribute, device):
        self.asked.append(("hip", attribute, device))
        answer._obj.value = self.answers[attribute]
        return self.status


@pytest.mark.parametrize("value, status, expected", [(1, 0, True), (0, 0, False), (1, 101, False)])
def test_the_driver_is_asked(value, status, expected):
    driver = Driver(value, status)
    assert kernels_use_host_addresses(GPU, lambda name: driver) is expected
    assert driver.asked == [("cuda", 91, 2)]


def test_rocm_has_another_number(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    driver = Driver(1)
    assert kernels_use_host_addresses(GPU, lambda name: driver)
    assert driver.asked == [("hip", 4, 2)]


@pytest.mark.parametrize("load", [lambda name: object(), lambda name: ctypes.CDLL("lib-not-there.so")])
def test_a_driver_that_does_not_answer_means_no(load):
    assert not kernels_use_host_addresses(GPU, load)
