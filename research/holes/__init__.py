"""The cost of documents without stored KV in the middle of a prompt, measured as published work measures it."""
