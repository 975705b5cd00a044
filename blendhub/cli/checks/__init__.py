"""The checks of ``blendhub check``: each yields findings, in sentences, with the command that mends what is wrong.

A check that imports torch or vLLM does so in another process, and no check starts a hub or changes anything.
"""
