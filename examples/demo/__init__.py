"""``make demo``: real vLLM serves prompts made of documents seen before, in three ways, and shows what each reused."""
