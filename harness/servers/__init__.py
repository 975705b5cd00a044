"""Servers that hubs use or are: Redis, Mooncake, a hub of a fleet."""
