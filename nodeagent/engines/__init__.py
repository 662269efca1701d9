"""Doors and engines: what connects the agent to engines, and the small real engine that is always there."""
