"""The start of a worker: kernels are compiled, the model is checked, attention is chosen and costs are measured, before
it serves. Nothing of it runs in a step.
"""
