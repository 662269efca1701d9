"""Several gateway processes on one port, and what is asked of all of them at once."""
