"""vLLM's own server under load, with BlendHub and without."""
