"""What the hub shows to people and to Prometheus. Nothing here changes the hub's state."""
