"""What ``blendhub warm`` does: documents are read, stand in two contexts, and are computed by a server.

Nothing here knows vLLM's code: the server is asked by HTTP.
"""
