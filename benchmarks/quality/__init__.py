"""What reuse costs in answers, and what selectors win back."""
