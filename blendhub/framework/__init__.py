"""How plugins are found, checked and made: the hooks, discovery, the host, options, errors that name a plugin.

It knows no kind of plugin beyond its contract, and neither the hub nor vLLM.
"""
