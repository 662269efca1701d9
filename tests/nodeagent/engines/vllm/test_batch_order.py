import pytest

from nodeagent.engines.vllm import batch_order
from nodeagent.engines.vllm.batch_order import BatchOrder, Place, payload_digest


def test_a_batch_is_next_ahead_seen_or_another_lifes() -> None:
    order = BatchOrder()
    assert order.place(0, b"a") is Place.NEXT
    order.advance(b"a")
    assert order.place(1, b"b") is Place.NEXT
    assert order.place(2, b"c") is Place.AHEAD
    assert order.place(0, b"a") is Place.SEEN
    assert order.place(0, b"other") is Place.OTHER_LIFE
    order.restart(7)
    assert (order.next_sequence, order.last_digest) == (7, b"")
    assert order.place(0, b"a") is Place.OTHER_LIFE


def test_an_order_goes_on_from_what_was_saved() -> None:
    order = BatchOrder(5, payload_digest(b"four"))
    assert order.place(4, b"four") is Place.SEEN
    assert order.place(3, b"three") is Place.OTHER_LIFE
    assert order.last_digest == payload_digest(b"four")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_order, "REMEMBERED_BATCHES_MAX", 3)
    order = BatchOrder()
    for number in range(10):
        order.advance(b"%d" % number)
        assert order.remembered <= 3
    assert order.place(7, b"7") is Place.SEEN
    assert order.place(6, b"6") is Place.OTHER_LIFE
