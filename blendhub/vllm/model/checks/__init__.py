"""The start-up checks on the loaded model: what can be reused, and whether chosen tokens are computed right. They end
before the first request. Nothing here serves requests, and the rest of the model's room does not import this one.
"""
