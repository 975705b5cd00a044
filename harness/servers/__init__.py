"""Servers that hubs use or are: Redis, Mooncake, a hub of a fleet; and a file system that can hang."""
