"""Everything that touches the loaded model and its paged KV: forwards, attention, pages, checks. Nothing here knows
requests, plans or the hub.
"""
