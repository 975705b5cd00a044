"""What became of a request's tokens: fates, the reasons why stretches were computed, reports. No I/O."""
