"""The record of a request, from its arrival until nothing of it is left to do: what it asked, where its KV comes from,
what it reuses, its blocks, saves and repair. Each part says what may become of it; what is done for all requests
together, and in which order, is decided in the room above.
"""
