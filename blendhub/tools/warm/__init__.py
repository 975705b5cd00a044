"""Computing a corpus once, before users ask about it: files of documents, their contexts, and the server that computes.

Nothing here knows vLLM's code: a server is asked by HTTP, and the hub by its client.
"""
