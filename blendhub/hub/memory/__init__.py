"""The arena: its shared memory, its slots, and what is evicted to make room. It knows chunks, but neither sessions nor
stores.
"""
