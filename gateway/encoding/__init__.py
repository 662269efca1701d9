"""Encoding: a request into the token ids its engine will see."""
