"""A hub among clients that are good, hostile, killed, frozen and in a container."""
