"""What people run beside a server: the analysis of a log, advice on a ratio. Commands stand in `cli`."""
