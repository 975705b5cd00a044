"""Everything that touches the loaded model and its paged KV."""
