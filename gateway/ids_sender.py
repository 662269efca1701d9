"""Sends requests on, with token ids where the engine takes them: what `ids_probe.py` has found, and nothing else."""

from collections import Counter

from gateway.encoding.encoder import Encoding
from gateway.fleet import EngineView
from gateway.header_rules import Headers
from gateway.ids_body import body_with_ids
from gateway.ids_probe import IdsProbe
from gateway.openai_schema import InferenceRequest
from gateway.upstream import Answer, Upstream

REFUSALS = frozenset({400, 422})
TEXT_EVERY = 32
"""One in so many requests of an engine goes as text though it takes ids: what the engine counts then is its own."""


class IdsSender:
    """The way to the engines."""

    def __init__(self, upstream: Upstream, probe: IdsProbe) -> None:
        self._upstream, self._probe = upstream, probe
        self._sent: Counter[str] = Counter()

    async def send(
        self, view: EngineView, path: str, headers: Headers, encoding: Encoding | None, request: InferenceRequest
    ) -> Answer:
        """See `Upstream.send`. `encoding` is what is believed to be the engine's; without one it gets text.

        An engine that refuses the request is asked again without ids, so that what it says is about what the client
        sent; if it takes it then, it gets no ids any more.
        """
        url, plain = view.url + path, request.body
        body = self._body_for(view, request, encoding)
        if body is None:
            return await self._upstream.send(url, headers, plain, view.api_key)
        answer = await self._upstream.send(url, headers, body, view.api_key)
        if answer.status not in REFUSALS:
            answer.has_ids = True
            return answer
        answer.close()
        answer = await self._upstream.send(url, headers, plain, view.api_key)
        if answer.status < 300:
            self._probe.note_refusal(view, request.endpoint)
        return answer

    def _body_for(self, view: EngineView, request: InferenceRequest, encoding: Encoding | None) -> bytes | None:
        if encoding is None or not self._probe.takes(view, request.endpoint) or (files := view.files) is None:
            return None
        body = body_with_ids(request, files.renderer, encoding, view.context_tokens)
        self._sent[view.engine] += body is not None
        return None if self._sent[view.engine] % TEXT_EVERY == 0 else body
