"""KV beyond the arena: what is written to a store, read from it, and followed in a shared one. The contract of stores
is elsewhere, and so are the stores, which are plugins.
"""
