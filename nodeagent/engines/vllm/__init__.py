"""vLLM beside the agent: what its GPU holds, and its door to the host's tiers."""
