"""Routers head to head over HTTP, in front of eight simulated engines in scaled time."""
