"""Ranks that are forked from the engine's process, which has imported vLLM, instead of importing it each."""

import importlib
import multiprocessing

import torch
from vllm.v1.executor import multiproc_executor


def arrange(other: str = "") -> None:
    """vLLM spawns ranks on CPUs alone. Its variables that bind threads to cores are read by processes that start.

    ``other``: a function as ``module:function`` that is called for the ranks, too.
    """
    if other:
        module, _, name = other.partition(":")
        getattr(importlib.import_module(module), name)()
    worker_main = multiproc_executor.WorkerProc.worker_main

    def on_one_core(*args, **named):
        torch.set_num_threads(1)
        worker_main(*args, **named)

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    multiproc_executor.WorkerProc.worker_main = staticmethod(on_one_core)
