"""The admin API on its own port: the fleet as JSON, probes, metrics. FastAPI, so it documents itself at `/docs`."""

from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from directory.members import HostRegistration, Member
from gateway.encoding.encoder import Encoders
from gateway.fleet import EngineView, Fleet
from gateway.ledger import Ledger
from gateway.metrics import GatewayMetrics
from gateway.openai_api import is_ready


def create_admin_api(
    fleet: Fleet, encoders: Encoders, ledger: Ledger, metrics: GatewayMetrics, is_draining: Any
) -> FastAPI:
    """The application; `is_draining()` says whether the gateway is going."""
    api = FastAPI(title="warmroute gateway: admin", version="1", openapi_url="/openapi.json")

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    @api.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        """May get traffic: an engine is ready and the gateway isn't draining."""
        if is_ready(fleet, is_draining()):
            return {"status": "ok"}
        response.status_code = 503
        return {"status": "draining" if is_draining() else "no engine is ready"}

    @api.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @api.get("/fleet")
    async def show_fleet() -> dict[str, Any]:
        """Hosts and engines: state, tiers, what is booked, and how exactly each is encoded."""
        table = fleet.table
        return {
            "directory": fleet.directory_state,
            "hosts": [_host_row(name, member) for name, member in sorted(table.hosts.items())],
            "engines": [_engine_row(view, ledger, encoders) for _, view in sorted(table.engines.items())],
        }

    return api


def _host_row(name: str, member: Member) -> dict[str, Any]:
    load = member.load
    assert isinstance(member.registration, HostRegistration)
    return {
        "host": name,
        "state": "live" if member.is_live else "retired" if member.retired else "lapsed",
        "agent_url": member.registration.agent_url,
        "tiers": {
            tier.label: {"bytes_used": load.tier_bytes_used.get(tier, 0), "bytes_limit": limit}
            for tier, limit in load.tier_bytes_limit.items()
        },
    }


def _engine_row(view: EngineView, ledger: Ledger, encoders: Encoders) -> dict[str, Any]:
    registration = view.registration
    return {
        "engine": view.engine,
        "host": registration.host,
        "url": registration.url,
        "state": view.state,
        "models": list(registration.models),
        "encoding": encoders.state(registration),
        "placements": "believed" if view.reach.own or view.reach.host else "not believed",
        "inflight_requests": ledger.running(view.engine),
        "booked_seconds": round(ledger.wait_s(view.engine), 4),
        "flops": view.rates.flops if view.rates else None,
        "chunk_tokens": registration.chunk_tokens,
        "key_scheme": registration.key_scheme,
        "fleet_digest": registration.identity.fleet_digest().hex(),
    }
