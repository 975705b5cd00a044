"""vLLM's blocks as the scheduler sees them: what the tables of a model hold, what the prefix cache has, and what the
pool lends while a prompt is blended. What a request reuses is decided in the room above.
"""
