"""Chunks from other hosts' agents, and for them."""
