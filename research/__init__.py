"""Studies: what was found once, and the code that found it. Nothing outside imports them but the agent's demo."""
