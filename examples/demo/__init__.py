"""``make demo``: real vLLM answers questions to documents seen before, in three ways, and shows what each reused."""
