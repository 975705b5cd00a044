"""The connector in vLLM's scheduler process."""
