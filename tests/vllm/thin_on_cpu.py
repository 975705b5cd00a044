"""What vLLM's own code for CPUs asks of its compiled operators, in plain torch: engines from a pack run on a CPU.

An engine's interpreter imports this before vLLM, beside ``gpu_stand_ins``.
"""

import torch

OPERATORS = torch.library.Library("_C", "FRAGMENT")
OPERATORS.define("greedy_argmax(Tensor logits) -> Tensor")
OPERATORS.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
OPERATORS.define("init_cpu_memory_env(int[] nodes) -> ()")
OPERATORS.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
