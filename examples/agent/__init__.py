"""An agent that reads a manual with three tools and clears its old tool results."""
