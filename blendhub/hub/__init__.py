"""The hub: one event loop that owns the index, the arena and the leases. It touches no byte of KV itself, and imports
neither the adapter nor a command. At its root stand what starts it, its settings and limits, and what spans the
rooms.
"""
