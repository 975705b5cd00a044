"""What edits in the middle of a conversation cost, on conversations that others made."""
