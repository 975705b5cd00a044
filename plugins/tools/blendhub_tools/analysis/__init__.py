"""Analysis of request logs: how much of a person's own prompts a hub could reuse. It needs neither vLLM nor a model."""
