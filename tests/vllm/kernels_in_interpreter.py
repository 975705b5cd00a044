"""vLLM's own Triton kernels in Triton's interpreter, as far as it lacks what they use. An engine's interpreter, or a
process of a test, imports this before vLLM."""

from tests.vllm import gpu_stand_ins  # noqa: F401  # isort: skip  # before Triton

import triton.language as tl
from triton.runtime import autotuner, interpreter


def tried_once() -> None:
    """Kernels have the first of their configurations: the interpreter has no clock of a device."""
    autotuner.Autotuner._bench = lambda self, *given, config, **named: [0.0]


def within_kernels() -> None:
    """Kernels call the interpreter's functions also where a module has imported them from ``tl`` by name, and its loops
    count in the interpreter's numbers."""
    run = interpreter.GridExecutor.__call__

    def interpreted(member):
        return lambda *given, **named: member(*given, **named, _semantic=interpreter.interpreter_semantic)

    def counted(*bounds):
        return map(interpreter._implicit_cvt, range(*map(int, bounds)))

    def call(executor, *given, **named):
        names = executor.fn.__globals__
        for name, member in list(names.items()):
            if tl.core.is_builtin(member):
                names[name] = interpreted(member)
        names["range"] = counted
        try:
            run(executor, *given, **named)
        finally:
            del names["range"]

    interpreter.GridExecutor.__call__ = call


tried_once()
within_kernels()
