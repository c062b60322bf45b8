"""A run on a page of its own, and its numbers for Prometheus. Reads run folders and never writes to them."""
