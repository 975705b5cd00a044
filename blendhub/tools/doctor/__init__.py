"""The checks of ``blendhub doctor``: each ends in findings about this machine."""
