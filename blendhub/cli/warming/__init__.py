"""What ``blendhub warm`` does: documents are read, and a server computes each behind others.

Nothing here knows vLLM's code: the server is asked by HTTP.
"""
