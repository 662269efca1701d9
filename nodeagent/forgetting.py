"""Forgets chunks on request, in every tier of the host, so that they don't come back. FORGET.md says it for operators.

    (1) a tombstone in memory: from here on nothing that it names is let in, be it under way or asked for
    (2) all tiers are searched, in a thread: what it names, and what follows that in a chain
    (3) the tombstone is kept on every drive and in the state folder, with the keys of what follows
    (4) what was found is found no more, and its placements are withdrawn; what engines read stays until they close
    (5) again from (2), until nothing is found: a chunk may have been let in that follows one not yet found
    (6) files are removed, slots zeroed

Killed before (3), the request isn't answered, and files are what they were. Killed later, the next start reads the
tombstone before it indexes anything. One request at a time.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from directory.tiers import Tier
from nodeagent.errors import AgentError, ForgetBusy, TombstonesFull
from nodeagent.forget_receipt import EngineRemains, Receipt
from nodeagent.forget_request import ForgetRequest
from nodeagent.labels import ChunkLabel
from nodeagent.metrics import AgentMetrics
from nodeagent.registration import Sleep
from nodeagent.roster import Roster
from nodeagent.tiers.chains import ChainAccount, Forgotten, Held, account_of, find_forgotten
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY
from nodeagent.tiers.dram import DramTier, Withdrawn
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.hierarchy import Entry
from nodeagent.tiers.nvme_index import NvmeEntry, NvmeIndex
from nodeagent.tiers.promotion import Promotion
from nodeagent.tiers.room import VICTIMS_PER_STEP_MAX
from nodeagent.tiers.tombstones import CUT_BYTES, NUMBER_BYTES, Tombstone, Tombstones
from nodeagent.tombstone_keeper import TombstoneKeeper

WAITING_MAX = 16
PASSES_MAX = 8
STEP_CHUNKS = 1_024
WRITE_WAIT_S = 10.0
"""How long the receipt waits for a write in hand to come to nothing; it does later, too."""
REMOVE_WAIT_S = 40.0
"""How long a few files may take to go: longer than a drive may hang (`quarantine.py`)."""
WITHDRAWN_KEYS_MAX = 4_096
"""Placements whose withdrawal is waited for a moment; the others follow."""
LOOK_S = 1.0
REST_FACTOR = 10.0
"""A search that nobody asked for rests so much longer than it took: a busy prefix that was forgotten tells of much."""
RETRY_S = 30.0
DRAM, NVME = Tier.DRAM.label, Tier.NVME.label

Reset = Callable[[str], Awaitable[str]]
"""Has an engine empty its prefix cache; what became of it, in words."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Doomed:
    """Chunks of one drive that nobody finds any more, and whose files are to be removed; and the index they were in."""

    drive: Drive
    index: NvmeIndex
    entries: list[NvmeEntry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Search:
    """What was searched: the chunks in DRAM, and the drives with their indexes of that moment; and what was found."""

    entries: Sequence[Entry]
    drives: Sequence[tuple[Drive, NvmeIndex]]
    found: Forgotten


class Forgetter:
    """One host's. `placements_pending` says how many changes the directory hasn't acknowledged; `group` holds the work.

    `nvme` is there where the host has that tier. `run` keeps what couldn't be done at once going.
    """

    def __init__(
        self,
        host: str,
        term_s: float,
        tombstones: Tombstones,
        keeper: TombstoneKeeper,
        dram: DramTier,
        nvme: NvmeTier | None,
        roster: Roster,
        withdrawn: Withdrawn,
        placements_pending: Callable[[], int],
        reset: Reset,
        group: asyncio.TaskGroup,
        metrics: AgentMetrics,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._host = host
        self._term_s = term_s
        self._tombstones = tombstones
        self._keeper = keeper
        self._dram = dram
        self._drives: Sequence[Drive] = nvme.drives if nvme is not None else ()
        self._writers = nvme.writers if nvme is not None else ()
        self._roster = roster
        self._withdrawn = withdrawn
        self._placements_pending = placements_pending
        self._reset = reset
        self._group = group
        self._metrics = metrics
        self._sleep = sleep
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._left: dict[str, set[bytes]] = {}

    async def forget(self, request: ForgetRequest) -> Receipt:
        """Forget, to the end, whatever becomes of the caller. `ForgetBusy`, `TombstonesFull`: nothing is done."""
        if self._waiting >= WAITING_MAX:
            raise ForgetBusy(f"{WAITING_MAX} requests to forget are under way; try again")
        self._waiting += 1
        outcome = await asyncio.shield(self._group.create_task(self._in_turn(request)))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run(self) -> None:
        """Retry what drives refused, keep tombstones on drives that are back, search again where more is known."""
        waited_s = rest_s = 0.0
        while True:
            await self._sleep(LOOK_S)
            waited_s += LOOK_S
            rest_s -= LOOK_S
            try:
                is_restoring = any(drive.is_up and drive.is_restoring for drive in self._drives)
                if self._tombstones.is_grown and not is_restoring and rest_s <= 0:
                    rest_s = await self._search_again() * REST_FACTOR
                if waited_s >= RETRY_S:
                    waited_s = 0.0
                    async with self._turn:
                        await self._retry()
            except Exception:  # the edge of the loop: it is tried again
                logger.exception("forgetting met a fault; trying again")
                self._tombstones.is_grown = True

    async def _search_again(self) -> float:
        """Forget what is known by now to follow what was forgotten. Returns the seconds that it took."""
        began = time.monotonic()
        self._tombstones.is_grown = False
        async with self._turn:
            await self._search_and_drop(_receipt("", "", 0.0), is_asked=False)
            await self._keeper.save()
        return time.monotonic() - began

    async def _in_turn(self, request: ForgetRequest) -> Receipt | Exception:
        try:
            async with self._turn:
                return await self._forget(request)
        except AgentError as error:
            return error
        except Exception as error:  # the edge of a task: whoever asked is told, and the agent lives
            logger.exception("forgetting met a fault; not all of it may be done")
            self._tombstones.is_grown = True
            return error
        finally:
            self._waiting -= 1

    async def _forget(self, request: ForgetRequest) -> Receipt:
        began, now_s = time.monotonic(), self._tombstones.now()
        tombstone = Tombstone(
            secrets.token_bytes(NUMBER_BYTES),
            now_s + self._term_s,
            request.identities,
            request.salt_tag,
            request.directory_keys,
            {key[:CUT_BYTES] for key in request.storage_keys},
        )
        receipt = _receipt(tombstone.number.hex(), request.by, tombstone.until_s)
        receipt.host, receipt.at = self._host, _iso(now_s)
        replaced = self._tombstones.add(tombstone)
        try:
            keys = await self._search_and_drop(receipt, is_asked=True)
        except TombstonesFull:
            self._tombstones.remove(tombstone, replaced)
            raise
        receipt.kept_in, receipt.not_kept_in = await self._keeper.save()
        receipt.is_confirmed = self._keeper.is_safe(receipt.kept_in) and not request.is_identity_unknown
        receipt.remains.identity_unknown = request.is_identity_unknown
        await self._dram.clean()
        receipt.remains.placements_pending = self._placements_pending()
        await self._note_remains(receipt, request, keys)
        receipt.took_s = round(time.monotonic() - began, 3)
        _log(receipt)
        return receipt

    def _under_way(self) -> dict[int, bool]:
        """Puts and loads that come to nothing, by their reservations' numbers: whether each is a load."""
        hierarchy = self._dram.hierarchy
        return {
            each.number: isinstance(each.holder, Promotion)
            for each in (hierarchy.reservations() if hierarchy is not None else ())
            if self._tombstones.meet(each.label, each.identity, each.written_at_s)
        }

    async def _search_and_drop(self, receipt: Receipt, *, is_asked: bool) -> set[bytes]:
        """Until nothing more is found. Returns the directory keys of what was dropped.

        Where it `is_asked` for, more than can be remembered raises `TombstonesFull`, before anything is dropped.
        """
        keys: set[bytes] = set()
        doomed: list[_Doomed] = []
        dropped: set[bytes] = set()
        under_way = self._under_way()
        for number in range(PASSES_MAX):
            search = await self._search()
            if is_asked and not number:
                new = sum(self._tombstones.is_new(cut, each) for cut, each in search.found.followers.items())
                self._tombstones.check_room(new)
            for place, (cut, tombstone) in enumerate(search.found.followers.items()):
                self._tombstones.follow(tombstone, cut)
                if place % STEP_CHUNKS == STEP_CHUNKS - 1:
                    await asyncio.sleep(0)
            under_way |= self._under_way()
            receipt.remains.files_unread = sum(index.listed_files for _, index in search.drives)
            receipt.remains.salt_unknown = search.found.salt_unknown
            receipt.remains.unlabelled = search.found.unlabelled
            receipt.remains.unlinked = search.found.unlinked
            if not search.found.count:
                break
            await self._keeper.save()
            await self._drop_in_dram(search, receipt, keys, dropped)
            await self._drop_on_disk(search, receipt, keys, dropped, doomed)
        else:
            self._tombstones.is_grown = True
        receipt.forgotten.loads = sum(under_way.values())
        receipt.forgotten.puts = len(under_way) - receipt.forgotten.loads
        receipt.forgotten.writes = sum(writer.forget(dropped) for writer in self._writers)
        await self._withdrawn(list(keys)[:WITHDRAWN_KEYS_MAX])
        for drive, writer in zip(self._drives, self._writers, strict=True):
            if drive.is_up:
                await self._await_write(writer, dropped)
        await asyncio.gather(*(self._remove(each, receipt) for each in doomed))
        receipt.remains.drives_away = [drive.name for drive in self._drives if not drive.is_up]
        return keys

    async def _search(self) -> _Search:
        hierarchy = self._dram.hierarchy
        entries = hierarchy.entries() if hierarchy is not None else []
        drives = [(drive, drive.index) for drive in self._drives if drive.is_up]
        accounts = [await _account_of(index) for _, index in drives]
        held = [Held(each.label, each.identity, each.written_at_s) for each in entries]
        found = await asyncio.to_thread(_find, held, accounts, self._tombstones, self._dram.labels.labels())
        return _Search(entries, drives, found)

    async def _drop_in_dram(self, search: _Search, receipt: Receipt, keys: set[bytes], dropped: set[bytes]) -> None:
        hierarchy = self._dram.hierarchy
        for place, (row, _) in enumerate(search.found.rows[0]):
            entry = search.entries[row]
            if hierarchy is None or not entry.is_indexed:
                continue
            hierarchy.forget(entry)
            dropped.add(entry.label.storage_key)
            self._metrics.evictions.labels(DRAM, "forgotten").inc()
            receipt.forgotten.dram.add(entry.length)
            self._note_key(entry.label.directory_key, keys, receipt)
            if entry.references:
                receipt.remains.open_references.add(entry.length)
            if place % STEP_CHUNKS == STEP_CHUNKS - 1:
                await asyncio.sleep(0)
        self._dram.account()

    async def _drop_on_disk(
        self,
        search: _Search,
        receipt: Receipt,
        keys: set[bytes],
        dropped: set[bytes],
        doomed: list[_Doomed],
    ) -> None:
        for (drive, index), rows in zip(search.drives, search.found.rows[1:], strict=True):
            of_drive = _Doomed(drive, index)
            doomed.append(of_drive)
            for start in range(0, len(rows), STEP_CHUNKS):
                if drive.index is not index:
                    break
                gone = index.drop_rows(rows[start : start + STEP_CHUNKS])
                of_drive.entries.extend(gone)
                self._metrics.evictions.labels(NVME, "forgotten").inc(len(gone))
                for entry in gone:
                    dropped.add(entry.label.storage_key)
                    receipt.forgotten.nvme.add(entry.size_bytes)
                    self._note_key(entry.label.directory_key, keys, receipt)
                await asyncio.sleep(0)

    @staticmethod
    def _note_key(key: bytes | None, keys: set[bytes], receipt: Receipt) -> None:
        if key is not None:
            keys.add(key)
            receipt.forgotten.placements += 1

    async def _await_write(self, writer: FileWriter, dropped: set[bytes]) -> None:
        try:
            async with asyncio.timeout(WRITE_WAIT_S):
                await writer.written(dropped)
        except TimeoutError:
            logger.warning("a forgotten chunk is still being written; its file goes when that ends")

    async def _remove(self, doomed: _Doomed, receipt: Receipt) -> None:
        """Remove one drive's files, as far as it is still the same."""
        drive, index, removed = doomed.drive, doomed.index, 0
        for start in range(0, len(doomed.entries), VICTIMS_PER_STEP_MAX):
            if drive.index is not index:
                break
            files = [(each.name, each.size_bytes) for each in doomed.entries[start : start + VICTIMS_PER_STEP_MAX]]
            removed += await _remove_files(drive, files, index)
        receipt.forgotten.files_removed += removed
        if drive.index is not index:
            return  # it has failed: its files are looked at when it is back
        drive.account()
        stuck = {each.name for each in doomed.entries if each.name in drive.room.stuck}
        self._left.setdefault(drive.name, set()).update(stuck)
        receipt.remains.files_unremoved += len(doomed.entries) - removed

    async def _note_remains(self, receipt: Receipt, request: ForgetRequest, keys: set[bytes]) -> None:
        for engine in self._roster.engines:
            identity, inventory = engine.registration.identity, engine.publisher.inventory
            if request.by == "identity":
                is_named = bool({identity.fleet_digest(), engine.identity_digest} & request.identities)
                chunks = len(inventory) if is_named else 0
            else:
                chunks = sum(1 for key in keys | request.directory_keys if inventory.mask(key))
            if chunks or request.reset_engines:
                reset = await self._reset(engine.name) if request.reset_engines else None
                receipt.remains.engines.append(EngineRemains(engine.name, chunks, reset))

    async def _retry(self) -> None:
        if not self._keeper.is_current:
            await self._keeper.save()
        for drive in self._drives:
            left = self._left.pop(drive.name, set())
            files = [(name, drive.room.stuck.pop(name)) for name in left if name in drive.room.stuck]
            if files:
                await _remove_files(drive, files, drive.index)
                drive.account()
                self._left[drive.name] = {name for name, _ in files if name in drive.room.stuck}


async def _remove_files(drive: Drive, files: Sequence[tuple[bytes, int]], index: NvmeIndex) -> int:
    """How many are gone. A drive that hangs mustn't keep others from forgetting: it is in quarantine by then."""
    try:
        async with asyncio.timeout(REMOVE_WAIT_S):
            return await drive.room.remove(files, index)
    except TimeoutError:
        logger.error("files of what was forgotten aren't removed from %s: it hangs", drive.name)
        return 0


async def _account_of(index: NvmeIndex) -> ChainAccount:
    steps = index.account_of_chains()
    while True:
        try:
            next(steps)
        except StopIteration as done:
            account: ChainAccount = done.value
            return account
        await asyncio.sleep(0)


def _find(
    held: Sequence[Held], accounts: Sequence[ChainAccount], tombstones: Tombstones, labels: Sequence[ChunkLabel]
) -> Forgotten:
    """Labels that came apart from their chunks tell of chunks that aren't held what follows them."""
    links = account_of([Held(label, UNKNOWN_IDENTITY, 0.0) for label in labels])
    return find_forgotten([account_of(held), *accounts], tombstones, links)


def _receipt(number: str, by: str, until_s: float) -> Receipt:
    return Receipt(number, "", by, "", _iso(until_s))


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _log(receipt: Receipt) -> None:
    forgotten, remains = receipt.forgotten, receipt.remains
    logger.info(
        "forgotten by %s, receipt %s: %d chunks in dram, %d in nvme (%d files removed), %d puts, %d loads and "
        "%d writes under way; %d files can't be removed yet; drives away: %s; kept in %d places",
        receipt.by,
        receipt.number,
        forgotten.dram.chunks,
        forgotten.nvme.chunks,
        forgotten.files_removed,
        forgotten.puts,
        forgotten.loads,
        forgotten.writes,
        remains.files_unremoved,
        ", ".join(remains.drives_away) or "none",
        len(receipt.kept_in),
    )
