"""Labels that arrive apart from their chunks."""

import pytest

from nodeagent.label_book import LabelBook
from nodeagent.labels import ChunkLabel


def label(number: int, directory_key: bytes | None = b"d" * 16) -> ChunkLabel:
    return ChunkLabel(bytes([number]) * 32, directory_key, None, 0)


class Tier:
    def __init__(self) -> None:
        self.learned: list[ChunkLabel] = []

    def learn(self, label: ChunkLabel) -> None:
        self.learned.append(label)


def test_a_label_is_told_to_the_tiers_and_found_by_puts_that_come_later() -> None:
    book, tier = LabelBook(), Tier()
    book.note(label(1), tier)
    assert tier.learned == [label(1)]
    assert book.complete(label(1, None)) == label(1)
    assert book.complete(label(2, None)) == label(2, None)
    assert book.complete(label(1, b"e" * 16)) == label(1, b"e" * 16), "who knows better is believed"


@pytest.mark.parametrize(
    ("known", "told", "is_more"),
    [
        ((None, None), (b"d", None), True),
        ((None, None), (b"d", b"s"), True),
        ((b"d", None), (b"d", b"s"), True),
        ((b"d", b"s"), (b"d", b"s"), False),
        ((b"d", b"s"), (b"d", None), False),
        ((b"d", None), (b"e", b"s"), False),
        ((b"d", None), (None, b"s"), False),
    ],
)
def test_a_label_adds_to_what_is_known_or_changes_nothing(known, told, is_more):
    labels = [ChunkLabel(bytes(32), key and key * 16, None, 0, tag and tag * 16) for key, tag in (known, told)]
    assert labels[1].adds_to(labels[0]) == is_more


def test_the_oldest_labels_are_forgotten() -> None:
    book, tier = LabelBook(labels_max=2), Tier()
    for number in (1, 2, 1, 3):
        book.note(label(number), tier)
    assert len(book) == 2
    assert book.complete(label(1, None)).directory_key is not None
    assert book.complete(label(2, None)).directory_key is None
