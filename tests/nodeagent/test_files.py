import hashlib

import pytest

from nodeagent.errors import HelloRefused
from nodeagent.files import FileShelf


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_files_are_found_by_the_digest_of_their_content():
    shelf = FileShelf()
    assert shelf.keep("one", {"a.json": b"A", "b.json": b"B"}) == {"a.json": sha(b"A"), "b.json": sha(b"B")}
    assert shelf.get(sha(b"A")) == b"A"
    assert shelf.get("no such digest") is None


def test_a_file_stays_while_one_of_its_owners_does():
    shelf = FileShelf()
    shelf.keep("one", {"a": b"A"})
    shelf.keep("two", {"other name": b"A", "b": b"B"})
    shelf.forget("one")
    assert shelf.get(sha(b"A")) == b"A"
    shelf.forget("two")
    shelf.forget("two")
    assert shelf.get(sha(b"A")) is None
    assert shelf.get(sha(b"B")) is None


def test_what_an_engine_brings_replaces_what_it_brought():
    shelf = FileShelf()
    shelf.keep("one", {"a": b"A"})
    shelf.keep("one", {"a": b"new"})
    assert shelf.get(sha(b"A")) is None
    assert shelf.get(sha(b"new")) == b"new"


def test_too_much_is_refused_and_changes_nothing():
    shelf = FileShelf(bytes_max=10)
    shelf.keep("one", {"a": b"12345"})
    with pytest.raises(HelloRefused, match="10"):
        shelf.keep("two", {"b": b"123456"})
    assert shelf.get(sha(b"12345")) == b"12345"
    assert shelf.get(sha(b"123456")) is None
