"""Two thousand streams at once: whether all are served, and whether the router still answers a probe."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import quantiles

import httpx

from bench.gateway.client import Load, run_load
from bench.gateway.engine import Behaviour
from bench.gateway.prompts import conversations
from bench.gateway.site import Ground, Router

STREAMS, TOKENS = 2000, 8
BEHAVIOUR = Behaviour(ttft_s=0.5, token_s=1.0, renders=True)
RAMP_S = 4.0
"""In which all have begun; the first ones last longer."""
PROBE_S = 0.25


@dataclass(frozen=True, slots=True)
class CrowdSeen:
    """`probe_max_s`: the slowest answer at `/health`; `rss_bytes` when all streams ran; `cores` all the while."""

    streams: int
    good: int
    errors: Mapping[str, int]
    first_token_p50_s: float
    first_token_p99_s: float
    probe_max_s: float
    rss_bytes: int
    cores: float


async def crowd(ground: Ground, router: Router) -> CrowdSeen:
    """All of them, on one router."""
    asked = conversations(1_000, 64, TOKENS, True)
    await ground.announcer.hold(asked)
    await ground.behave(BEHAVIOUR)
    load = Load([each.body for each in asked], STREAMS, STREAMS, timeout_s=60.0, ramp_s=RAMP_S)
    probes, rss = list[float](), list[int]()
    probing = asyncio.create_task(_probe(router, probes, rss))
    began, before = time.monotonic(), router.cpu_s()
    try:
        outcome = await run_load(router.port, load)
    finally:
        probing.cancel()
        await asyncio.wait({probing})
    cores = (router.cpu_s() - before) / (time.monotonic() - began)
    hundredths = quantiles(outcome.first_token_s or [0.0, 0.0], n=100)
    return CrowdSeen(
        streams=STREAMS,
        good=outcome.good,
        errors={**outcome.errors, **{str(status): each for status, each in outcome.statuses.items() if status != 200}},
        first_token_p50_s=hundredths[49],
        first_token_p99_s=hundredths[98],
        probe_max_s=max(probes, default=float("inf")),
        rss_bytes=max(rss, default=0),
        cores=cores,
    )


async def _probe(router: Router, probes: list[float], rss: list[int]) -> None:
    path = "/healthz" if router.name == "warmroute" else "/health"
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
        while True:
            began = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                await http.get(f"http://127.0.0.1:{router.port}{path}")
            probes.append(time.monotonic() - began)
            rss.append(router.rss_bytes())
            await asyncio.sleep(PROBE_S)
