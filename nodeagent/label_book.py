"""Labels of chunks that an engine names by keys of its own: what arrives with its events, joined with what it stores.

A foreign engine hands over bytes under its own hash, without tokens; the directory key comes later, or earlier, with
its KV events. The book keeps the latest labels, so that a chunk stored before its label gets one, and one stored
after it has one from the start. A label that was forgotten costs an announcement, never bytes.
"""

from collections import OrderedDict
from typing import Protocol

from nodeagent.labels import ChunkLabel

LABELS_MAX = 262_144
"""95 MB when full (tracemalloc); the chunks of a host with 3 TB of KV at 12 MB a chunk."""


class Labelled(Protocol):
    """A tier whose chunks can learn their labels."""

    def learn(self, label: ChunkLabel) -> None:
        """The label of a chunk that may be held here has become known."""
        ...


class LabelBook:
    """The newest labels, by storage key; the oldest go first."""

    def __init__(self, labels_max: int = LABELS_MAX) -> None:
        self._labels: OrderedDict[bytes, ChunkLabel] = OrderedDict()
        self._labels_max = labels_max

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> list[ChunkLabel]:
        """All of them."""
        return list(self._labels.values())

    def note(self, label: ChunkLabel, tier: Labelled) -> None:
        """A label has become known; `tier` learns it now, puts that come later find it here."""
        self._labels[label.storage_key] = label
        self._labels.move_to_end(label.storage_key)
        if len(self._labels) > self._labels_max:
            self._labels.popitem(last=False)
        tier.learn(label)

    def complete(self, label: ChunkLabel) -> ChunkLabel:
        """The label with its directory key, parent and position, where they are known; else as it is."""
        return label if label.directory_key is not None else self._labels.get(label.storage_key, label)
