"""The cache of pieces' ids stays within its budget and keeps what is used."""

from gateway.encoding.piece_cache import PieceCache


def test_it_stays_within_its_budget_and_keeps_what_is_asked_for() -> None:
    cache = PieceCache(100_000)
    cache.put("kept", False, b"ids")
    for number in range(10_000):
        cache.put(f"piece {number}", False, bytes(40))
        assert cache.get("kept", False) == b"ids"
        assert cache.bytes_used <= 100_000
    assert cache.get("piece 9999", False) == bytes(40)
    assert cache.get("piece 0", False) is None


def test_a_text_that_comes_first_has_ids_of_its_own() -> None:
    cache = PieceCache(100_000)
    cache.put("x", True, b"first")
    assert cache.get("x", False) is None
    cache.put("x", False, b"later")
    assert (cache.get("x", True), cache.get("x", False)) == (b"first", b"later")


def test_a_piece_that_would_push_out_all_else_is_not_kept() -> None:
    cache = PieceCache(100_000)
    cache.put("small", False, b"ids")
    cache.put("x" * 60_000, False, b"ids")
    assert cache.get("x" * 60_000, False) is None
    assert cache.get("small", False) == b"ids"


def test_a_piece_put_again_costs_nothing() -> None:
    cache = PieceCache(100_000)
    cache.put("x", False, b"ids")
    used = cache.bytes_used
    cache.put("x", False, b"ids")
    assert cache.bytes_used == used
