"""Who may read or write which slots until when, and the sessions that hold these rights. Nothing here reads a clock, or
answers a message.
"""
