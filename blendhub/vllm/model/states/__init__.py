"""The states of recurrent layers in forwards of our own: how each kind of layer computes behind a state, what a text
does to it, and the way of a request's state through a forward. Which texts have maps is decided elsewhere.
"""
