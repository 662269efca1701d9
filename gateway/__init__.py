"""The gateway: one request in, one engine chosen, bytes streamed."""
