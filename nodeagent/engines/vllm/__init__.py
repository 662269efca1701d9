"""vLLM: what its GPU holds, learned from its KV events. The versions and formats are those of vLLM 0.32 and before."""
