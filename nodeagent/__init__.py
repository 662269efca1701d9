"""The node agent: one host's tiers, an honest account of them, and the doors to its engines."""
