"""What an engine needs on a GPU machine that has torch but not vLLM: vLLM's Python, stand-ins for its compiled
operators, and wheels. Nothing here measures.
"""
