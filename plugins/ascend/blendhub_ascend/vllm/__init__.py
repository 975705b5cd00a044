"""What vllm-ascend needs of BlendHub's adapter beyond vLLM's own runners: another connector, and another platform. Only
vLLM 0.23, with vllm-ascend, imports this; the device does not.
"""
