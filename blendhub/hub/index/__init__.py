"""What is stored where: chunks in runs, runs in namespaces, and the matchers that find their tokens. No bytes of KV, no
leases, and no store.
"""
