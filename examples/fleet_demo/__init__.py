"""Documents that one machine served, asked for on another."""
