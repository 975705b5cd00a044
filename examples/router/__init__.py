"""A small reverse proxy for several servers: each request goes where most of its prompt is reused, weighed by load."""
