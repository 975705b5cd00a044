"""Servers that hubs use or are: Redis, Mooncake, a hub of a fleet; and networks and a file system that can fail."""
