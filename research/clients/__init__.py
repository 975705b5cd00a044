"""Other people's clients and benchmarks at vLLM's server, with BlendHub and without.

What imports LangChain or LlamaIndex runs in the environment of the clients, `build/clients`, and imports little else.
"""
