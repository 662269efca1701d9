import hashlib
from collections import Counter

import pytest

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.identity import UNSCOPED, Scope
from nodeagent.engines.vllm import gpu_table
from nodeagent.engines.vllm.block_tree import Label
from nodeagent.engines.vllm.events import AllBlocksCleared, Batch, Event, decode_batch
from nodeagent.engines.vllm.gpu_table import GpuChanges, GpuTable, Group
from tests.nodeagent.engines.vllm.recorded import payloads, recorded, removed, stored

FLEET = b"\x01" * 32
ADAPTERS = {"ad1": b"\x07" * 32, "copy": b"\x07" * 32}


def table(chunk_tokens: int = 4, entries_max: int = 10_000) -> GpuTable:
    return GpuTable(FLEET, chunk_tokens, ADAPTERS.get, entries_max)


def apply(gpu: GpuTable, *events: Event) -> GpuChanges:
    return gpu.apply(Batch(events=events))


def keys(tokens: list[int], scope: Scope = UNSCOPED, chunk_tokens: int = 4) -> list[bytes]:
    return [directory_key(key) for key in chunk_keys(scope.root(FLEET), pack_tokens(tokens), chunk_tokens)]


def names(count: int, start: int = 1) -> list[int | bytes]:
    """Whole hashes, as an engine tells them with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return [hashlib.sha256(bytes([number])).digest() for number in range(start, start + count)]


EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_chunk_is_held_from_its_last_block_until_its_first_removal() -> None:
    gpu, blocks = table(), names(4)
    assert not apply(gpu, stored(blocks[:1], EIGHT[:2]))
    assert apply(gpu, stored(blocks[1:], EIGHT[2:], parent=blocks[0])).stored == tuple(keys(EIGHT))
    assert apply(gpu, removed(blocks[3])) == GpuChanges(removed=(keys(EIGHT)[1],)), "what is gone has no label"
    assert gpu.held == {keys(EIGHT)[0]}
    apply(gpu, stored(blocks[3:], EIGHT[6:], parent=blocks[2]))
    assert apply(gpu, removed(blocks[2])).removed == (keys(EIGHT)[1],)
    apply(gpu, removed(blocks[3]), removed(blocks[1]), removed(blocks[0]))
    assert (gpu.held, gpu.entries, gpu.skipped) == (frozenset(), 0, Counter())


def test_a_label_joins_the_whole_hash_of_the_last_block_to_the_directory_key() -> None:
    gpu, blocks = table(), names(4)
    first, second = keys(EIGHT)
    changes = apply(gpu, stored(blocks, EIGHT))
    tag = UNSCOPED.salt_tag
    assert changes.labels == (
        Label(blocks[1], first, None, 0, None, tag),  # type: ignore[arg-type]
        Label(blocks[3], second, first, 1, blocks[1], tag),  # type: ignore[arg-type]
    )
    assert gpu.labels() == changes.labels
    assert not apply(table(), stored([1, 2, 3, 4], EIGHT)).labels, "64 bits of a hash label nothing"


def test_a_removal_and_a_store_in_one_batch_change_nothing() -> None:
    gpu, blocks = table(), names(2)
    apply(gpu, stored(blocks, EIGHT[:4]))
    changes = apply(gpu, removed(blocks[1]), stored(blocks[1:], EIGHT[2:4], parent=blocks[0]))
    assert (changes.stored, changes.removed) == ((), ())
    assert gpu.held == set(keys(EIGHT[:4]))


def test_a_second_copy_outlives_the_first() -> None:
    gpu, blocks = table(), names(2)
    apply(gpu, stored(blocks, EIGHT[:4]), stored(blocks, EIGHT[:4]))
    assert not apply(gpu, removed(blocks[0])).removed
    assert apply(gpu, removed(blocks[0])).removed == tuple(keys(EIGHT[:4]))


def test_a_child_that_comes_before_its_parent_waits_for_it() -> None:
    gpu, blocks = table(), names(4)
    assert not apply(gpu, stored(blocks[3:], EIGHT[6:], parent=blocks[2]))
    assert not apply(gpu, stored(blocks[1:3], EIGHT[2:6], parent=blocks[0]))
    assert gpu.waiting_blocks == 3
    assert apply(gpu, stored(blocks[:1], EIGHT[:2])).stored == tuple(keys(EIGHT))
    assert gpu.waiting_blocks == 0


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_table, "WAITING_BLOCKS_MAX", 5)
    gpu = table()
    for number in range(20):
        apply(gpu, stored(names(2, 2 * number), EIGHT[:4], parent=b"unknown %d" % number))
        assert gpu.waiting_blocks <= 5
    assert gpu.skipped == {"parent_unknown": 18}
    monkeypatch.setattr(gpu_table, "WAITING_BYTES_MAX", 10)
    apply(gpu, stored(names(2, 60), EIGHT[:4], parent=b"unknown"))
    assert gpu.waiting_blocks == 0


def test_a_child_whose_ancestor_is_gone_keeps_its_chunk() -> None:
    """Removed out of order, the parent takes its own chunk along and no other."""
    gpu, blocks = table(), names(4)
    apply(gpu, stored(blocks, EIGHT))
    assert apply(gpu, removed(blocks[0])).removed == (keys(EIGHT)[0],)
    assert gpu.held == {keys(EIGHT)[1]}
    assert apply(gpu, stored(blocks[:1], EIGHT[:2])).stored == (keys(EIGHT)[0],)


def test_a_reset_clears_the_gpu_and_what_follows_is_known() -> None:
    gpu, blocks = table(), names(4)
    apply(gpu, stored(blocks, EIGHT))
    gpu.clear(is_complete=False)
    assert not gpu.is_complete
    apply(gpu, stored(blocks, EIGHT))
    changes = apply(gpu, stored(names(2, 9), EIGHT[4:]), AllBlocksCleared(), stored(blocks[:2], EIGHT[:4]))
    assert set(changes.removed) == {keys(EIGHT)[1]}
    assert gpu.held == {keys(EIGHT)[0]}
    assert gpu.is_complete


def test_a_table_that_outgrows_its_bound_says_that_it_is_incomplete() -> None:
    gpu, blocks = table(entries_max=8), names(9)
    apply(gpu, stored(blocks[:4], EIGHT))
    assert (len(gpu.held), gpu.is_complete) == (2, True)
    changes = apply(gpu, stored(blocks[4:], EIGHT + EIGHT[:2], parent=blocks[3]))
    assert (set(changes.removed), gpu.held, gpu.is_complete) == (set(keys(EIGHT)), frozenset(), False)
    assert gpu.skipped["table_full"] == 1
    assert gpu.entries <= 8


def test_events_about_other_media_are_ignored() -> None:
    gpu, blocks = table(), names(2)
    assert not apply(gpu, stored(blocks, EIGHT[:4], medium="CPU"))
    assert apply(gpu, stored(blocks, EIGHT[:4], medium=None)), "before media had names there was one"
    assert gpu.skipped == {"other_medium": 1}


def test_salt_and_adapter_are_folded_into_the_key() -> None:
    gpu = table()
    salted = stored(names(2), EIGHT[:4], extra_keys=(("S",), None))
    adapted = stored(names(2, 3), EIGHT[:4], extra_keys=(("ad1", "S"), ("ad1",)), lora_name="ad1", lora_id=1)
    lora = ADAPTERS["ad1"]
    assert apply(gpu, salted).stored == tuple(keys(EIGHT[:4], Scope(salt="S")))
    assert apply(gpu, adapted).stored == tuple(keys(EIGHT[:4], Scope(lora=lora, salt="S")))


def test_every_chunk_of_a_salted_chain_has_the_salts_tag() -> None:
    gpu, blocks = table(), names(4)
    apply(gpu, stored(blocks[:2], EIGHT[:4], extra_keys=(("S",), None)))
    apply(gpu, stored(blocks[2:], EIGHT[4:], parent=blocks[1], extra_keys=(None, None)))
    assert [label.salt_tag for label in gpu.labels()] == [Scope(salt="S").salt_tag] * 2


def test_two_names_of_one_adapter_hold_one_key_until_both_are_gone() -> None:
    gpu, first, second = table(), names(2), names(2, 3)
    expected = tuple(keys(EIGHT[:4], Scope(lora=ADAPTERS["ad1"])))
    assert apply(gpu, stored(first, EIGHT[:4], extra_keys=(("ad1",),) * 2, lora_name="ad1")).stored == expected
    assert not apply(gpu, stored(second, EIGHT[:4], extra_keys=(("copy",),) * 2, lora_name="copy")).stored
    assert not apply(gpu, removed(first[1])).removed
    assert apply(gpu, removed(second[1])).removed == expected


REFUSED = {
    "adapter_unknown": {"extra_keys": (("other",), ("other",)), "lora_name": "other"},
    "adapter_unnamed": {"extra_keys": (None, None), "lora_id": 3},
    "extra_keys_missing": {"extra_keys": None},
    "medium": {"extra_keys": ((("image", 0),), None)},
    "prompt_embeds": {"extra_keys": ((b"digest",), None)},
    "unreadable_key": {"extra_keys": (None, ("image",))},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_blocks_with_keys_that_cannot_be_read_are_refused_with_all_below(reason: str) -> None:
    gpu, blocks = table(), names(8)
    event = stored(blocks[:2], EIGHT[:4], **REFUSED[reason])  # type: ignore[arg-type]
    assert not apply(gpu, event)
    assert not apply(gpu, stored(blocks[2:], EIGHT[4:] + EIGHT, parent=blocks[1]))
    assert gpu.skipped == {reason: 1}
    apply(gpu, *(removed(block) for block in reversed(blocks)))
    assert gpu.entries == 0


@pytest.mark.parametrize(
    "extra_keys",
    [
        ((("image", 0), "S"), None),
        (("S", "T"), None),
        ((3,), None),
        (((),), None),
        (("",), None),
        (None,),
        (None, ("S",)),
        (None, (("image", 2),)),
    ],
    ids=repr,
)
def test_nothing_but_a_salt_in_a_first_block_is_read(extra_keys: tuple[object, ...]) -> None:
    assert not apply(table(), stored(names(2), EIGHT[:4], extra_keys=extra_keys))


@pytest.mark.parametrize("second", [None, ("copy",), ("ad1", "S")], ids=repr)
def test_an_adapter_that_a_block_does_not_repeat_is_not_read(second: tuple[str, ...] | None) -> None:
    assert not apply(table(), stored(names(2), EIGHT[:4], extra_keys=(("ad1",), second), lora_name="ad1"))


def test_two_prefixes_under_one_short_hash_are_both_unclaimed() -> None:
    gpu = table()
    apply(gpu, stored([1, 2, 3, 4], EIGHT))
    changes = apply(gpu, stored([1, 2], EIGHT[2:6]))
    assert set(changes.removed) == set(keys(EIGHT))
    assert gpu.skipped == {"hash_conflict": 1}
    apply(gpu, stored([11, 12], EIGHT[:4]))
    assert apply(gpu, stored([12], EIGHT[:2], parent=2)).removed == (keys(EIGHT)[0],), "another parent"


def test_a_whole_hash_in_two_places_is_unclaimed() -> None:
    gpu, blocks = table(), names(4)
    apply(gpu, stored(blocks, EIGHT))
    changes = apply(gpu, stored(blocks[3:], EIGHT[6:], parent=blocks[1]))
    assert (changes.removed, gpu.skipped) == ((keys(EIGHT)[1],), {"hash_conflict": 1})


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_needs_as_many_blocks_as_vllm_asks_for(window: int, blocks: int) -> None:
    """cdiv(window - 1, block): the token that is computed is part of the window."""
    assert Group("sliding_window", window, 4).window_blocks == blocks


def test_tokens_that_do_not_fit_the_blocks_are_counted() -> None:
    gpu = table()
    assert not apply(gpu, stored(names(2), EIGHT[:6], block_size=2))
    assert not apply(gpu, removed(*names(2)))
    assert gpu.skipped == {"token_count": 1, "removed_unknown": 2}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_cache_spec_kind": "mamba"}, "group 0 is mamba"),
        ({"kv_cache_spec_kind": "chunked_local_attention"}, "group 0 is chunked_local_attention"),
        ({"kv_cache_spec_kind": "sliding_window"}, "group 0 has a window of unknown length"),
        ({"kv_cache_spec_kind": None, "group_idx": 1}, "group 1 of unknown kind"),
        ({"block_size": 3}, "blocks of 3 tokens don't divide a chunk of 4"),
        ({"group_idx": 1, "block_size": 1}, "group 1 has blocks of 1 tokens, others don't"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_followed_claims_nothing_and_says_why(fields: dict, reason: str) -> None:  # type: ignore[type-arg]
    gpu, blocks = table(), names(2)
    if fields.get("group_idx"):
        apply(gpu, stored(blocks, EIGHT[:4]))
    changes = apply(gpu, stored(names(2, 3), EIGHT[:4], **fields))
    assert gpu.approximation == reason
    assert (gpu.held, gpu.is_complete) == (frozenset(), False)
    assert not apply(gpu, AllBlocksCleared(), stored(blocks, EIGHT[:4])).stored
    assert not gpu.is_complete
    assert not changes.stored
    gpu.begin_life()
    assert apply(gpu, stored(blocks, EIGHT[:4])).stored


def test_a_group_that_changes_its_shape_is_refused() -> None:
    gpu = table()
    apply(gpu, stored(names(2), EIGHT[:4]))
    assert not apply(gpu, stored(names(1, 3), EIGHT[:1], block_size=1))
    assert not apply(gpu, stored(names(1, 4), EIGHT[:2], kv_cache_spec_kind="mamba"))
    assert gpu.skipped == {"group_conflict": 2}
    assert gpu.held == set(keys(EIGHT[:4]))


def windowed(blocks: list[int | bytes], tokens: list[int], window: int = 5, **fields: object) -> Event:
    return stored(
        blocks, tokens, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=window, group_idx=1, **fields
    )


def test_a_window_that_is_gone_ends_the_run_there() -> None:
    """A window of 5 tokens needs the two blocks of 2 before a place."""
    gpu, blocks = table(), names(6)
    tokens = [*EIGHT, 9, 9, 9, 9]
    apply(gpu, stored(blocks, tokens), windowed(blocks, tokens))
    assert gpu.held == set(keys(tokens))
    assert apply(gpu, removed(blocks[2], group=1)).removed == (keys(tokens)[1],)
    assert apply(gpu, removed(blocks[5], group=1)).removed == (keys(tokens)[2],)
    assert gpu.held == {keys(tokens)[0]}


def test_a_window_longer_than_a_chunk_reaches_back() -> None:
    gpu, blocks = table(), names(6)
    tokens = [*EIGHT, 9, 9, 9, 9]
    apply(gpu, windowed(blocks, tokens, window=8), stored(blocks, tokens))
    assert apply(gpu, removed(blocks[2], group=1)).removed == (keys(tokens)[1], keys(tokens)[2])


def test_a_window_group_that_is_seen_late_takes_claims_back() -> None:
    gpu, blocks = table(), names(2)
    apply(gpu, stored(blocks, EIGHT[:4]))
    assert apply(gpu, windowed([], EIGHT[:4], block_size=2)).removed == tuple(keys(EIGHT[:4]))


def test_windows_alone_claim_nothing() -> None:
    gpu = table()
    assert not apply(gpu, windowed(names(2), EIGHT[:4]))
    apply(gpu, removed(*names(2), group=1))
    assert gpu.entries == 0


def test_the_recorded_engine_holds_what_its_prompts_say() -> None:
    gpu = GpuTable(FLEET, 256, ADAPTERS.get)
    batches = [decode_batch(raw) for raw in payloads("server_1")]
    for batch in batches[:-1]:
        gpu.apply(batch)
    tokens = [message["decoded"][1][0]["token_ids"] for message in recorded("server_1")[:-1]]
    expected = keys(tokens[8], Scope(salt="p256"), 256) + keys(tokens[10], Scope(salt="p1024"), 256)
    assert gpu.held == set(expected)
    assert len(expected) == 5
    assert set(gpu.apply(batches[-1]).removed) == set(expected), "the prefix cache was reset"
    assert gpu.skipped == {}


def test_the_recorded_evictions_duplicates_and_adapters_are_followed() -> None:
    gpu = GpuTable(FLEET, 64, ADAPTERS.get)
    batches = [decode_batch(raw) for raw in payloads("server_2")]
    sent = [message["decoded"][1] for message in recorded("server_2")]
    for batch in batches[:7]:
        gpu.apply(batch)
    adapted = keys(sent[1][0]["token_ids"], Scope(lora=ADAPTERS["ad1"], salt="S"), 64)
    assert set(adapted) <= gpu.held
    for batch in batches[7:]:
        gpu.apply(batch)
    copies: Counter[str] = Counter()
    for event in (event for events in sent for event in events):
        sign = 1 if event["type"] == "BlockStored" else -1
        copies.update({str(name): sign for name in event["block_hashes"]})
    assert sum(gpu.groups[0].copies.values()) == sum(copies.values())
    assert gpu.held == {key for event in (e for es in sent for e in es) for key in whole_chunks(event, copies)}


def whole_chunks(event: dict, copies: Counter[str]) -> list[bytes]:  # type: ignore[type-arg]
    """The chunks of 64 tokens of a prompt that was stored at once, whose blocks all have copies left."""
    if event["type"] != "BlockStored" or event["parent_block_hash"] is not None:
        return []
    own = event["extra_keys"][0] or []
    scope = Scope(lora=ADAPTERS["ad1"], salt="S") if own else UNSCOPED
    found = keys(event["token_ids"], scope, 64)
    alive = [copies[str(name)] > 0 for name in event["block_hashes"]]
    return [key for place, key in enumerate(found) if alive[2 * place] and alive[2 * place + 1]]


def test_offloaded_blocks_of_the_recorded_engine_are_not_the_gpus() -> None:
    gpu = GpuTable(FLEET, 32, ADAPTERS.get)
    for raw in payloads("server_4"):
        gpu.apply(decode_batch(raw))
    assert gpu.skipped == {"other_medium": 28}
    sent = [event for message in recorded("server_4")[9:] for event in message["decoded"][1]]  # since the last reset
    assert len(gpu.held) == len(
        {str(name) for event in sent if event["medium"] == "GPU" for name in event["block_hashes"]}
    )
