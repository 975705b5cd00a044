"""What operators see of the adapter: its statistics, in vLLM's log and on vLLM's ``/metrics``. Nothing here decides
what is reused.
"""
