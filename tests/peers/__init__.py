"""Other people's tests on BlendHub: vLLM's of its connectors, and LMCache's of its matcher.

``python -m tests.peers PROJECT FOLDER`` runs them twice, without BlendHub and with it. Their source distributions
stand below ``build``; nothing of them is copied here or changed. The plugins of pytest in this folder are imported from
the folder itself, because ``tests`` is another package there.
"""
