"""The arena: its shared memory, its slots, and what is evicted to make room."""
