"""Which layout: what each one costs in memory and time, the search for the best, and why the others lose. No JAX."""
