"""The host's tiers: where chunks are kept, found, checked and evicted."""
