"""Which chunks are forgotten: the one pass over all tiers against a plain search that goes round until it is done."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chains import Held, account_of, find_forgotten
from nodeagent.tiers.chunk_file import FileHeader
from nodeagent.tiers.nvme_index import NvmeIndex
from nodeagent.tiers.tombstones import CUT_BYTES, Tombstone, Tombstones
from tests.nodeagent.running import storage_key

NODES = 7
IDENTITIES = (b"1" * 32, b"2" * 32)
TAGS = (b"t" * 16, b"u" * 16)
TIERS = 3


@dataclass(frozen=True)
class Node:
    """A chunk of a forest; `copies` say of each tier whether it is there, with its label, parent and tag known."""

    number: int
    above: "Node | None"
    identity: bytes
    tag: bytes
    copies: tuple[tuple[bool, bool, bool, bool], ...]

    @property
    def key(self):
        return storage_key(f"{self.number}")

    @property
    def position(self):
        return 0 if self.above is None else self.above.position + 1

    def labels(self):
        """By tier, as far as it is there."""
        for tier, (is_there, has_key, has_parent, has_tag) in enumerate(self.copies):
            if is_there:
                parent = self.above.key if self.above is not None and has_parent else None
                directory_key = self.key[:16] if has_key else None
                yield tier, ChunkLabel(self.key, directory_key, parent, self.position, self.tag if has_tag else None)


COPIES = st.tuples(*[st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())] * TIERS)


@st.composite
def forests(draw):
    nodes = []
    for number in range(NODES):
        above = draw(st.none() | st.sampled_from(nodes)) if nodes else None
        identity = above.identity if above else draw(st.sampled_from(IDENTITIES))
        tag = above.tag if above else draw(st.sampled_from(TAGS))
        nodes.append(Node(number, above, identity, tag, draw(COPIES)))
    return nodes


NUMBERS = st.sets(st.integers(0, NODES - 1), max_size=2)
ASKED = st.tuples(
    st.sampled_from([frozenset(), frozenset(IDENTITIES[:1])]), st.sampled_from([None, TAGS[0]]), NUMBERS, NUMBERS
)


def at_once(steps):
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def plainly_forgotten(nodes, stone):
    """Keys of nodes of which a copy is met, or comes after one that is."""

    def is_met(node, label, found):
        return (
            stone.names_origin(node.identity, label.salt_tag)
            or label.directory_key in stone.directory_keys
            or label.storage_key[:CUT_BYTES] in stone.followers
            or (label.parent is not None and (label.parent[:CUT_BYTES] in stone.followers or label.parent in found))
        )

    found, before = set(), None
    while found != before:
        before = set(found)
        found |= {node.key for node in nodes if any(is_met(node, label, found) for _, label in node.labels())}
    return found


@settings(max_examples=80, deadline=None)
@given(forests(), ASKED)
def test_what_is_named_and_all_that_follows_is_found_wherever_it_lies(nodes, asked):
    identities, tag, named, known = asked
    keys = [storage_key(f"{number}") for number in range(NODES)]
    stone = Tombstone(
        b"n" * 16, 10.0, identities, tag, frozenset(keys[n][:16] for n in named), {keys[n][:16] for n in known}
    )
    book = Tombstones(lambda: 0.0)
    book.add(stone)
    held, indexes = [], [NvmeIndex(lambda key, mask: None) for _ in range(TIERS - 1)]
    for node in nodes:
        for tier, label in node.labels():
            if tier == 0:
                held.append(Held(label, node.identity, 0.0))
            else:
                indexes[tier - 1].restore(FileHeader(label, node.identity, 100, b"c" * 16), 0.0)
    found = find_forgotten([account_of(held), *(at_once(index.account_of_chains()) for index in indexes)], book)
    expected = plainly_forgotten(nodes, stone)
    assert {held[row].label.storage_key for row, _ in found.rows[0]} == {
        each.label.storage_key for each in held if each.label.storage_key in expected
    }
    for index, rows in zip(indexes, found.rows[1:], strict=True):
        here = {entry.label.storage_key for entry in index.entries()}
        assert {entry.label.storage_key for entry in index.drop_rows(rows)} == here & expected
        assert {entry.label.storage_key for entry in index.entries()} == here - expected
    for node in nodes:
        for _, label in node.labels():
            shows = stone.names_origin(node.identity, label.salt_tag)
            assert (node.key[:CUT_BYTES] in found.followers) >= (node.key in expected and not shows)
    stay = [(node, label) for node in nodes for _, label in node.labels() if node.key not in expected]
    assert found.salt_unknown == sum(label.salt_tag is None for _, label in stay)
    assert found.unlabelled == sum(label.directory_key is None for _, label in stay)
    there = {node.key for node in nodes for _ in node.labels()}
    assert found.unlinked == sum(label.parent is not None and label.parent not in there for _, label in stay)


def test_what_was_written_after_the_end_stays():
    stone = Tombstone(b"n" * 16, 10.0, directory_keys=frozenset([storage_key("a")[:16]]))
    book = Tombstones(lambda: 20.0)
    book.add(stone)
    label = ChunkLabel(storage_key("a"), storage_key("a")[:16], None, 0)
    held = [Held(label, IDENTITIES[0], 5.0), Held(label, IDENTITIES[0], 15.0)]
    for each, rows in zip(held, ([(0, 1)], []), strict=True):
        assert find_forgotten([account_of([each])], book).rows == [rows]


def test_a_label_without_its_chunk_links_what_comes_after_it():
    """`b` isn't held; its label came with an engine's events."""
    keys = {name: storage_key(name) for name in "abc"}
    labels = {
        name: ChunkLabel(keys[name], keys[name][:16], keys[above] if above else None, position)
        for position, (name, above) in enumerate([("a", None), ("b", "a"), ("c", "b")])
    }
    book = Tombstones(lambda: 0.0)
    book.add(Tombstone(b"n" * 16, 10.0, directory_keys=frozenset([keys["a"][:16]])))
    held = account_of([Held(labels[name], IDENTITIES[0], 0.0) for name in "ac"])
    links = account_of([Held(labels["b"], bytes(32), 0.0)])
    without, found = find_forgotten([held], book), find_forgotten([held], book, links)
    assert (without.rows, without.unlinked) == ([[(0, 1)]], 1)
    assert (found.rows, found.unlinked) == ([[(0, 1), (1, 1)]], 0)
    assert keys["b"][:CUT_BYTES] in found.followers


def test_a_row_that_changes_while_it_is_copied_is_left_out(monkeypatch):
    monkeypatch.setattr("nodeagent.tiers.chains.COPY_STEP_BYTES", 16)
    index = NvmeIndex(lambda key, mask: None)
    for name in "abc":
        label = ChunkLabel(storage_key(name), storage_key(name)[:16], None, 0)
        index.restore(FileHeader(label, IDENTITIES[0], 100, b"c" * 16), 0.0)
    steps = index.account_of_chains()
    next(steps)
    index.drop(index.get(storage_key("b")))
    label = ChunkLabel(storage_key("d"), None, storage_key("a"), 1)
    index.restore(FileHeader(label, IDENTITIES[1], 100, b"c" * 16), 0.0)
    for name in "efg":
        label = ChunkLabel(storage_key(name), None, None, 0)
        index.restore(FileHeader(label, IDENTITIES[1], 100, b"c" * 16), 0.0)
    account = at_once(steps)
    assert [bool(serial) for serial in account.serials] == [True, False, True]
    assert account.keys[:32] == storage_key("a")
    assert account.keys[64:] == storage_key("c")
