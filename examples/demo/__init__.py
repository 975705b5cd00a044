"""``make demo``: real vLLM answers questions to documents seen before, in four ways, and shows what each reused."""
