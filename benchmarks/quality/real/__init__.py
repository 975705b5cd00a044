"""What reuse costs a model that others trained, on texts that others wrote: the second part of ``make quality``."""
