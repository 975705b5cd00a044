"""What a router gains that asks each hub what it would reuse, played with hubs that have no KV."""
