"""``make quality``: what reuse costs in right answers, and what each selector wins back of that, in real vLLM."""
