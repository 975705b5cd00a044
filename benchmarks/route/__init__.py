"""What a router gains by asking each hub what it would reuse, played with hubs that have no KV."""
