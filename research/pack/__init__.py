"""Engines on a GPU machine that has torch but not vLLM: its Python, stand-ins for its operators, and wheels."""
