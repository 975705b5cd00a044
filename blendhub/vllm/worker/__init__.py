"""The connector in each vLLM worker process."""
