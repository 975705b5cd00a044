"""Advice: which selector and which ratio hold a given agreement on a person's own prompts."""
