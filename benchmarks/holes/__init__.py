"""What a document costs that nobody has computed before, in the procedure in which others measure it."""
