"""A vLLM of our own on this machine, for the local fleet and the tests: CPU backend, pinned version, SmolLM2."""
