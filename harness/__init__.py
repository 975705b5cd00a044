"""What starts vLLM engines, and the servers and networks of a fleet, for tests, benchmarks and demos; not published."""
