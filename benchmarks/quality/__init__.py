"""``make quality``: what reuse changes in a real model's answers, and what each selector wins back, in vLLM."""
