"""The hub: one event loop that owns the index, the arena and the leases."""
