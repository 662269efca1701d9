"""Parity: whether the gateway's token ids are the engines', compared all the time."""
