"""vLLM beside the agent: what its GPU holds, and its door to the host's tiers. Written for vLLM 0.32."""
