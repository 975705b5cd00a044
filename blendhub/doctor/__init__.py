"""What is wrong on this machine: checks that each end in findings, for ``blendhub doctor``."""
