"""Rows of gateways in the fleet's table, as a reader finds them."""

from directory.members import (
    TERM_S,
    GatewayRegistration,
    Load,
    Member,
    decode_load,
    draw_incarnation,
    encode_load,
)
from gateway.ledger import Ledger
from gateway.shared_load import published


def gateway_row(ledger: Ledger, reported_at: float, now: float, incarnation: bytes = b"", **other: object) -> Member:
    """What a poll at `now` finds of a gateway whose ledger was as it is when it reported it."""
    load = decode_load(encode_load(Load(booked=published(ledger, reported_at))))
    fields: dict[str, object] = {"remaining_s": TERM_S - (now - reported_at)}
    registration = GatewayRegistration("another", "http://127.0.0.1:1")
    return Member(incarnation or draw_incarnation(), registration, load, **{**fields, **other})  # type: ignore[arg-type]
