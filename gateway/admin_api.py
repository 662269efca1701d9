"""The admin API on its own port: the fleet as JSON, probes, metrics. FastAPI describes it at `/openapi.json`."""

import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from directory.costs import Rates, break_even_tokens
from directory.members import GatewayRegistration, HostRegistration, Member, encode_registration
from gateway.completion import Completion
from gateway.discovery.discovery import Discovery
from gateway.encoding_report import EncodingReport
from gateway.errors import BodyTooLarge, GatewayError, InvalidRequest
from gateway.fleet import EngineView, Fleet
from gateway.ids_probe import IdsProbe
from gateway.load_publisher import LoadPublisher
from gateway.lookup import ChunkLookup
from gateway.metrics import GatewayMetrics
from gateway.openai_api import is_ready
from gateway.openai_schema import CHAT, COMPLETIONS, ENDPOINTS, RERANK, RESPONSES, SCORE, parse_request
from gateway.parity.parity import Parity
from gateway.prefill_watch import PrefillWatch
from gateway.preparation import Incoming, Prepared
from gateway.routing.query import RoutingDecision, Score
from gateway.shared_load import EngineLoads

FIELD_ENDPOINTS = {"prompt": COMPLETIONS, "input": RESPONSES, "query": RERANK[0], "text_1": SCORE, "queries": SCORE}
"""To which endpoint a request with this field goes, the first that is there, unless it has messages."""

_REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"description": "No request that can be served; the error is in OpenAI's shape.", "model": dict[str, Any]},
    404: {"description": "A model that isn't served here.", "model": dict[str, Any]},
    413: {"description": "A body over the limit.", "model": dict[str, Any]},
    503: {"description": "No engine of the model is ready.", "model": dict[str, Any]},
}
_ASKED = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}}
        }
    },
}


def create_admin_api(
    completion: Completion,
    fleet: Fleet,
    lookup: ChunkLookup,
    encoding: EncodingReport,
    probe: IdsProbe,
    loads: EngineLoads,
    publisher: LoadPublisher,
    watch: PrefillWatch,
    parity: Parity,
    discovery: Discovery,
    metrics: GatewayMetrics,
    is_draining: Any,
    body_bytes_max: int,
) -> FastAPI:
    """The application; `is_draining()` says whether the gateway is going."""
    # Its pages of documentation would load scripts from elsewhere: the description alone is served.
    api = FastAPI(title="warmroute gateway: admin", version="1", docs_url=None, redoc_url=None)

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    @api.get("/readyz", responses={503: {"model": dict[str, str], "description": "It isn't, or is going."}})
    async def readyz(response: Response) -> dict[str, str]:
        """May get traffic: an engine is ready and the gateway isn't draining."""
        if is_ready(fleet, is_draining()):
            return {"status": "ok"}
        response.status_code = 503
        return {"status": "draining" if is_draining() else "no engine is ready"}

    @api.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @api.get("/fleet")
    async def show_fleet() -> dict[str, Any]:
        """Hosts and engines: state, tiers, what is booked, how each is encoded, with which files; how fresh that is."""
        return _fleet_rows(fleet, lookup, loads, watch, encoding, probe) | {
            "parity": parity.rows(),
            "reports": publisher.state,
            "discovery": discovery.rows(),
            "other_gateways": [_gateway_row(member) for member in loads.gateways],
        }

    _add_explanation(api, completion, fleet, body_bytes_max)
    return api


def _add_explanation(api: FastAPI, completion: Completion, fleet: Fleet, body_bytes_max: int) -> None:
    @api.post("/route/explain", responses=_REFUSED, openapi_extra={"requestBody": _ASKED})
    async def explain_route(request: Request, endpoint: str = "") -> Response:
        """What would become of a request: every candidate with each term; nothing is sent.

        The body is the request itself, to `endpoint`, such as `/v1/messages`. If that is left out, fields tell: with
        `messages` it is a chat, with `prompt` a completion, with `input` a response, with `query` a rerank.
        """
        try:
            body = await _bounded_body(request, body_bytes_max)
            incoming = Incoming(parse_request(_endpoint_of(endpoint, body), body), request.headers.raw, 0.0)
            prepared, decision = await completion.explain(incoming)
        except GatewayError as error:
            return Response(error.body(), error.status, media_type="application/json")
        view = fleet.table.engines.get(decision.ranked[0].engine)
        return Response(orjson.dumps(_explanation(prepared, decision, view)), media_type="application/json")


def _fleet_rows(
    fleet: Fleet,
    lookup: ChunkLookup,
    loads: EngineLoads,
    watch: PrefillWatch,
    encoding: EncodingReport,
    probe: IdsProbe,
) -> dict[str, Any]:
    table = fleet.table
    views = [view for _, view in sorted(table.engines.items())]
    return {
        "version": version("warmroute"),
        "unix_time_s": time.time(),
        **_directory_row(fleet, lookup),
        "hosts": [_host_row(name, member) for name, member in sorted(table.hosts.items())],
        "engines": [_engine_row(view, fleet, loads, encoding, probe) | _rate_row(view, watch) for view in views],
        "model_files": encoding.of_files(table.engines.values()),
    }


def _directory_row(fleet: Fleet, lookup: ChunkLookup) -> dict[str, Any]:
    age_s = fleet.table_age_s()
    return {
        "directory": fleet.directory_state,
        "directory_age_seconds": None if age_s is None else round(age_s, 1),
        "directory_full_for": list(fleet.directory_full_for),
        "lookups": lookup.state,
        "lookup_pauses": lookup.pauses,
    }


def _endpoint_of(named: str, body: bytes) -> str:
    """The endpoint named, or that of a body's fields. Raises `InvalidRequest` for one that isn't served."""
    if named:
        if named not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        return named
    if b'"messages"' in body:
        return CHAT
    for field, endpoint in FIELD_ENDPOINTS.items():
        if b'"%s"' % field.encode() in body:
            return endpoint
    return CHAT


async def _bounded_body(request: Request, body_bytes_max: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > body_bytes_max:
            raise BodyTooLarge(f"the body is larger than {body_bytes_max} bytes")
    return bytes(body)


def _explanation(prepared: Prepared, decision: RoutingDecision, view: EngineView | None) -> dict[str, Any]:
    encoding = prepared.encoding
    return {
        "engine": decision.ranked[0].engine,
        "reason": decision.reason,
        "price": decision.price,
        "prompt_tokens": encoding.prompt_tokens,
        "encoding": prepared.encoding_class(view),
        "encoding_reason": encoding.reason or None,
        "directory": prepared.holders.degraded or "ok",
        "directory_keys": [key.hex() for key in prepared.keys],
        "candidates": [_score_row(score) for score in decision.ranked],
    }


def _score_row(score: Score) -> dict[str, Any]:
    return {
        "engine": score.engine,
        "score_seconds": score.score_s,
        "wait_seconds": score.wait_s,
        "load_seconds": score.load_s,
        "prefill_seconds": score.prefill_s,
        "price": score.price,
        "replies_seconds": score.replies_s,
        "evict_seconds": score.evict_s,
        "expected_ttft_seconds": score.expected_ttft_s,
        "matched_tokens": score.matched_tokens,
        "tier_tokens": {tier.label: tokens for tier, tokens in score.tier_tokens.items()},
        "expected_tokens": score.expected_tokens,
        "peer": score.peer or None,
        "peer_tokens": score.peer_tokens,
    }


def _gateway_row(member: Member) -> dict[str, Any]:
    assert isinstance(member.registration, GatewayRegistration)
    return {
        "gateway": member.registration.gateway,
        "url": member.registration.url,
        "inflight_requests": sum(work.running for work in member.load.booked.values()),
    }


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


def _engine_row(
    view: EngineView, fleet: Fleet, loads: EngineLoads, encoding: EncodingReport, probe: IdsProbe
) -> dict[str, Any]:
    registration, own, others = view.registration, loads.of_own(view.engine), loads.of_others(view.engine)
    is_believed = fleet.is_directory_known() and bool(view.reach.own or view.reach.host)
    placements = "believed" if is_believed else "not believed"
    row: dict[str, Any] = {
        "engine": view.engine,
        "host": registration.host if registration else None,
        "url": view.url,
        "state": view.state,
        "models": list(view.models),
        "kv_tokens": view.kv_tokens,
        **encoding.of_engine(view),
        "token_ids": probe.state(view),
        "placements": placements if registration else "none without an agent",
        "inflight_requests": own.running,
        "booked_seconds": round(own.wait_s, 4),
        "others_inflight_requests": others.running,
        "others_booked_seconds": round(others.wait_s, 4),
    }
    if registration is not None:
        row |= {
            "chunk_tokens": registration.chunk_tokens,
            "key_scheme": registration.key_scheme,
            "fleet_digest": registration.identity.fleet_digest().hex(),
            "registration": orjson.loads(encode_registration(registration)),
        }
    return row


def _rate_row(view: EngineView, watch: PrefillWatch) -> dict[str, Any]:
    """How fast the engine is: as it registered, as its first tokens show, and how far expectations were off."""
    report = watch.report(view)
    rates = view.rates or Rates(0.0)
    row: dict[str, Any] = {
        "flops": report.flops,
        "flops_registered": view.rates.flops if view.rates else None,
        "flops_correction": round(report.correction, 3),
        "flops_samples": round(report.samples, 1),
        "ttft_error_factor": _rounded(report.error_factor),
        "ttft_took_over_expected": _rounded(report.took_over_expected),
    }
    if report.flops is not None:
        corrected = replace(rates, flops=report.flops)
        row["break_even_tokens"] = {
            tier.label: break_even_tokens(view.shape, corrected, tier) for tier in rates.bytes_per_s
        }
    return row


def _rounded(factor: float | None) -> float | None:
    return None if factor is None else round(factor, 3)
