"""Puts together what forgets: a part of the agent's composition root, in a file of its own."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from fastapi import APIRouter

from nodeagent.config import AgentConfig
from nodeagent.engines.vllm.follower import VllmFollower
from nodeagent.engines.vllm.prefix_reset import reset_prefix_cache
from nodeagent.forget_api import create_forget_api
from nodeagent.forgetting import Forgetter
from nodeagent.metrics import AgentMetrics
from nodeagent.publisher import Publisher
from nodeagent.registration import Sleep
from nodeagent.roster import Roster
from nodeagent.tiers.dram import DramTier, Withdrawn
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.tombstone_file import StateFolder
from nodeagent.tiers.tombstones import Tombstones
from nodeagent.tombstone_keeper import TombstoneKeeper


class ForgetParts:
    """`tombstones` are there from the start, for the tiers; then `read`, before anything is indexed; then `begin`."""

    def __init__(self, config: AgentConfig, metrics: AgentMetrics, sleep: Sleep) -> None:
        self.tombstones = Tombstones()
        self._config = config
        self._metrics = metrics
        self._sleep = sleep
        self._nvme: NvmeTier | None = None
        self._keeper: TombstoneKeeper

    @property
    def admin_token(self) -> str | None:
        """What a request must bring, if anything."""
        token = self._config.listen.admin_token
        return token.get_secret_value() if token is not None else None

    async def read(self, nvme: NvmeTier | None) -> None:
        """Learn what was forgotten before. Raises `TombstonesUnreadable`."""
        self._nvme = nvme
        drives = nvme.drives if nvme is not None else ()
        self._keeper = TombstoneKeeper(self.tombstones, StateFolder(str(self._config.state)), drives, self._metrics)
        await self._keeper.read()

    def begin(
        self,
        tier: DramTier,
        roster: Roster,
        follower: VllmFollower,
        host: Publisher,
        withdrawn: Withdrawn,
        group: asyncio.TaskGroup,
    ) -> tuple[APIRouter, Sequence[Coroutine[Any, Any, None]]]:
        """The route, and the loops that may be cancelled at any moment."""

        async def reset(engine: str) -> str:
            return (await reset_prefix_cache(roster, follower, engine)).value

        forgetter = Forgetter(
            self._config.host,
            self._config.forget.term_s,
            self.tombstones,
            self._keeper,
            tier,
            self._nvme,
            roster,
            withdrawn,
            lambda: host.pending_keys,
            reset,
            group,
            self._metrics,
            sleep=self._sleep,
        )
        api = create_forget_api(forgetter.forget, lambda: [each.registration for each in roster.engines])
        return api, (forgetter.run(), tier.keep_clean())
