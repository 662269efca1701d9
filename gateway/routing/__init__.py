"""Routing: which engine answers soonest. Pure: no clock, no I/O."""
