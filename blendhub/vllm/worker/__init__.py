"""What runs in each vLLM worker: copies, recomputation and saves that the scheduler has planned. Nothing here decides
what is reused, and what knows the model's layers is in ``model``.
"""
