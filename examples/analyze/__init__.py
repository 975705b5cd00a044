"""A log of requests, made up, and what `blendhub analyze` says about it."""
