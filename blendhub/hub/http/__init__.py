"""What the hub shows to people and to Prometheus, and the deletion that people ask for there. Nothing else here changes
the hub's state.
"""
