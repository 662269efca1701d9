from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.reference.text_stream import TextStream

CUTS = st.lists(st.integers(1, 5), max_size=40)


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return [*pieces, data[at:]]


@given(data=st.binary(max_size=60) | st.text(max_size=30).map(str.encode), lengths=CUTS)
def test_the_pieces_are_the_text(data: bytes, lengths: list[int]) -> None:
    stream = TextStream()
    text = "".join(stream.push(piece) for piece in cut(data, lengths)) + stream.finish()
    assert text == data.decode("utf-8", errors="replace")


@given(text=st.text(max_size=30), lengths=CUTS)
def test_a_character_is_never_split(text: str, lengths: list[int]) -> None:
    stream, so_far = TextStream(), ""
    for piece in cut(text.encode(), lengths):
        so_far += stream.push(piece)
        assert text.startswith(so_far)


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    lengths=CUTS,
)
def test_nothing_at_or_behind_a_stop_is_sent(text: str, stops: list[str], lengths: list[int]) -> None:
    stream, so_far = TextStream(stops), ""
    for piece in cut(text.encode(), lengths):
        so_far += stream.push(piece)
        assert not any(stop in so_far for stop in stops)
        if stream.is_stopped:
            break
    so_far += stream.finish()
    assert text.startswith(so_far)
    assert stream.is_stopped == any(stop in text for stop in stops)
    if stream.is_stopped:
        assert any(text[len(so_far) :].startswith(stop) for stop in stops)
        assert not any(stop in so_far for stop in stops)
    else:
        assert so_far == text


def test_what_may_become_a_stop_waits_and_is_sent_when_it_doesnt() -> None:
    stream = TextStream(["END"])
    assert stream.push(b"the EN") == "the "
    assert stream.push(b"TRY") == "ENTRY"


def test_the_earliest_of_several_stops_counts() -> None:
    stream = TextStream(["world", "lo"])
    assert stream.push(b"hello world") == "hel"
    assert stream.is_stopped
    assert stream.push(b"more") == stream.finish() == ""


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    stream = TextStream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"
