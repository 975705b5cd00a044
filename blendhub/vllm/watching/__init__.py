"""What operators see of the adapter: its statistics, vLLM's metrics of them, and spans of traces. Nothing here decides
what is reused.
"""
