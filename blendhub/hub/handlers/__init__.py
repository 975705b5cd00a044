"""The hub's answers to the messages of its clients, one module a group of messages. What lasts between two messages
is in the other rooms.
"""
