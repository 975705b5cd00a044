"""The hub from outside: its messages, sessions, the hub as an object, the arena's view, rights to write."""
