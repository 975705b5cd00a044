"""A hub among clients that are good, hostile, killed and frozen."""
