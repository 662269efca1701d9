"""A small real model behind an OpenAI-compatible API, its KV taken from and given to the agent. Not a product."""
