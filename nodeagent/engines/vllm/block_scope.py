"""What narrows a vLLM block's key beside its tokens: read from an event's extra keys, or refused. Pure.

vLLM publishes them untagged, per block and in this order: the adapter's name (every block), pairs (medium, offset),
the salt (first block only), a digest of prompt embeddings. So in a first block a string that isn't the adapter's name
is the salt, and in later blocks nothing but the adapter's name can be read. What can't be read is refused with all
that follows: an image's blocks hold the same placeholder tokens as another image's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from directory.errors import IdentityRefused
from directory.identity import Scope
from nodeagent.engines.vllm.events import BlockStored, ExtraKey

AdapterDigests = Callable[[str], bytes | None]
"""The content digest (32 bytes) of the adapter of that name, or None where there is none to be trusted."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a block, and all below it, isn't announced."""

    reason: str


def first_block_scope(event: BlockStored, adapters: AdapterDigests) -> Scope | Refusal:
    """The scope of a chain whose first block is the first of `event`."""
    keys = _own_keys(event, 0)
    if isinstance(keys, Refusal):
        return keys
    salt = keys[0] if keys else None
    if len(keys) > 1 or not (salt is None or isinstance(salt, str)):
        return Refusal(_unreadable(keys))
    lora = None
    if event.lora_name is not None:
        lora = adapters(event.lora_name)
        if lora is None:
            return Refusal("adapter_unknown")
    try:
        return Scope(lora=lora, salt=salt)
    except IdentityRefused:
        return Refusal("unreadable_key")


def later_block_refusal(event: BlockStored, index: int) -> Refusal | None:
    """Why the block at `index` of `event`, which isn't the first of its chain, can't be announced, if so."""
    keys = _own_keys(event, index)
    if isinstance(keys, Refusal):
        return keys
    return Refusal(_unreadable(keys)) if keys else None


def _own_keys(event: BlockStored, index: int) -> tuple[ExtraKey, ...] | Refusal:
    """The block's extra keys without the adapter's name."""
    if event.extra_keys is None:
        return Refusal("extra_keys_missing")  # vLLM before it told them: a salted block would look like any other
    keys = (event.extra_keys[index] if index < len(event.extra_keys) else ((),)) or ()
    if event.lora_name is None:
        return keys if event.lora_id is None else Refusal("adapter_unnamed")
    if not keys or keys[0] != event.lora_name:
        return Refusal("unreadable_key")
    return keys[1:]


def _unreadable(keys: tuple[ExtraKey, ...]) -> str:
    if any(isinstance(key, tuple) and key for key in keys):
        return "medium"
    return "prompt_embeds" if any(isinstance(key, bytes) for key in keys) else "unreadable_key"
