"""One simulated engine's HTTP, as far as routers ask: what vLLM 0.32 answers, in its words."""

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from aiohttp import web

from bench.fleet.engine import Reply, SimulatedEngine
from bench.fleet.words import NotOurText, chat_text, encode

MODEL = "bench-8b"
BODY_BYTES_MAX = 64 << 20
KNOWN_MAX = 256
CONTEXT_TOKENS = 131_072
OUTPUT_TOKENS_DEFAULT = 16
WORD = " bebe"

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class Known:
    """What was worked out before: ids by prompt, and renders by body, oldest first; engines share it.

    The engines of one process would else be late with their answers where a router has each of them render each prompt,
    which vLLM does in another process than its engine.
    """

    ids: dict[str, list[int]] = field(default_factory=dict)
    renders: dict[bytes, bytes] = field(default_factory=dict)

    def keep(self, table: dict[Key, Value], key: Key, value: Value) -> Value:
        """Into one of the tables; the oldest goes."""
        if len(table) >= KNOWN_MAX:
            del table[next(iter(table))]
        table[key] = value
        return value


class EngineApi:
    """Serves one engine."""

    def __init__(self, engine: SimulatedEngine, known: Known) -> None:
        self._engine, self._known = engine, known
        self._ids = itertools.count()

    def app(self) -> web.Application:
        """The application; `/bench` is ours, all else is vLLM's."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/bench", self._bench)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        about = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": CONTEXT_TOKENS}
        return web.json_response({"object": "list", "data": [about]})

    async def _metrics(self, request: web.Request) -> web.Response:
        engine, counters, labels = self._engine, self._engine.counters, f'{{engine="0",model_name="{MODEL}"}}'
        values = {
            "num_requests_running": engine.running,
            "num_requests_waiting": engine.waiting,
            "kv_cache_usage_perc": engine.kv_use,
            "time_to_first_token_seconds_sum": counters.ttft_s,
            "time_to_first_token_seconds_count": counters.requests,
            "request_prefill_time_seconds_sum": counters.prefill_s,
            "request_prefill_time_seconds_count": counters.requests,
            "request_prefill_kv_computed_tokens_sum": counters.prefill_tokens,
            "request_prefill_kv_computed_tokens_count": counters.requests,
            "prefix_cache_queries_total": counters.prompt_tokens,
            "prefix_cache_hits_total": counters.cached_tokens,
        }
        lines = [f"vllm:{name}{labels} {float(value)}" for name, value in values.items()]
        lines.append(f'vllm:engine_sleep_state{{engine="0",model_name="{MODEL}",sleep_state="awake"}} 1.0')
        return web.Response(text="\n".join(lines) + "\n")

    async def _bench(self, request: web.Request) -> web.Response:
        engine = self._engine
        counters = engine.counters
        told = {
            "lateness_s": list(engine.lateness_s),
            "computed_tokens": counters.prefill_tokens,
            "requests": counters.requests,
            "ttft_s": counters.ttft_s,
        }
        return web.json_response(told)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=False)

    async def _render_chat(self, request: web.Request) -> web.Response:
        return await self._rendered(request, is_chat=True)

    async def _render_completion(self, request: web.Request) -> web.Response:
        return await self._rendered(request, is_chat=False)

    async def _rendered(self, request: web.Request, is_chat: bool) -> web.Response:
        """vLLM's `GenerateRequest`, a list of them for completions."""
        body = await request.read()
        answer = self._known.renders.get(body)
        if answer is None:
            try:
                ids = self._prompt_ids(orjson.loads(body))
            except (NotOurText, ValueError, KeyError, TypeError) as error:
                return _refused(error)
            rendered = {"request_id": self._name(), "token_ids": ids, "sampling_params": {}, "model": MODEL}
            answer = self._known.keep(self._known.renders, body, orjson.dumps(rendered if is_chat else [rendered]))
        return web.Response(body=answer, content_type="application/json")

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            ids = self._prompt_ids(orjson.loads(await request.read()))
        except (NotOurText, ValueError, KeyError, TypeError) as error:
            return _refused(error)
        return _json({"count": len(ids), "max_model_len": CONTEXT_TOKENS, "tokens": ids})

    async def _answer(self, request: web.Request, is_chat: bool) -> web.StreamResponse:
        try:
            fields = orjson.loads(await request.read())
            ids = self._prompt_ids(fields)
            tokens = int(fields.get("max_completion_tokens") or fields.get("max_tokens") or OUTPUT_TOKENS_DEFAULT)
        except (NotOurText, ValueError, KeyError, TypeError, AttributeError) as error:
            return _refused(error)
        reply, frame = self._engine.submit(ids, tokens), self._frame(is_chat)
        if not fields.get("stream"):
            while await reply.pieces.get():
                pass
            text = WORD * reply.output_tokens
            choice = {"index": 0, "finish_reason": "length"}
            said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            return _json(frame | {"choices": [choice | said], "usage": self._usage(reply)})
        wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        return await self._stream(request, reply, frame, is_chat, wants_usage)

    async def _stream(
        self, request: web.Request, reply: Reply, frame: dict[str, Any], is_chat: bool, wants_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        frame = frame | {"object": "chat.completion.chunk"} if is_chat else frame
        head, written = json.dumps(frame)[:-1].encode(), 0
        try:
            while count := await reply.pieces.get():
                written += count
                events = [_event(head, is_chat)] * count
                if written == count and is_chat:
                    events.insert(0, _role_event(head))
                if written == reply.output_tokens:
                    events.append(_last_event(head, is_chat))
                await response.write(b"".join(events))
            if wants_usage:
                usage = json.dumps(self._usage(reply)).encode()
                await response.write(b'data: %b, "choices": [], "usage": %b}\n\n' % (head, usage))
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass  # the client has left: nobody is there to be told
        return response

    def _prompt_ids(self, fields: Mapping[str, Any]) -> list[int]:
        if "prompt" in fields and not isinstance(fields["prompt"], str):
            return [int(each) for each in fields["prompt"]]
        text = fields["prompt"] if "prompt" in fields else chat_text(fields["messages"])
        ids = self._known.ids.get(text)
        return self._known.keep(self._known.ids, text, encode(text)) if ids is None else ids

    def _usage(self, reply: Reply) -> dict[str, object]:
        return {
            "prompt_tokens": reply.prompt_tokens,
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
            "completion_tokens": reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._engine.cached_tokens(reply.job)},
        }

    def _frame(self, is_chat: bool) -> dict[str, Any]:
        kind = "chat.completion" if is_chat else "text_completion"
        return {"id": self._name(), "object": kind, "created": int(time.time()), "model": MODEL}

    def _name(self) -> str:
        return f"bench-{next(self._ids)}"


def _event(head: bytes, is_chat: bool) -> bytes:
    said = b'"delta": {"content": "%b"}' if is_chat else b'"text": "%b"'
    choice = said % WORD.encode()
    return b'data: %b, "choices": [{"index": 0, %b, "logprobs": null, "finish_reason": null}]}\n\n' % (head, choice)


def _role_event(head: bytes) -> bytes:
    delta = b'{"role": "assistant", "content": ""}'
    return b'data: %b, "choices": [{"index": 0, "delta": %b, "logprobs": null, "finish_reason": null}]}\n\n' % (
        head,
        delta,
    )


def _last_event(head: bytes, is_chat: bool) -> bytes:
    said = b'"delta": {}' if is_chat else b'"text": ""'
    return b'data: %b, "choices": [{"index": 0, %b, "logprobs": null, "finish_reason": "length"}]}\n\n' % (head, said)


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _refused(error: Exception) -> web.Response:
    told = {"error": {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}}
    return web.json_response(told, status=400)
