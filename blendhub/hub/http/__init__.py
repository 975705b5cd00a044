"""What the hub shows to people and to Prometheus."""
