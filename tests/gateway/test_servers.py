"""How the gateway's servers are set up."""

import pytest
import uvicorn.protocols.websockets.auto

from gateway.servers import server


def test_no_websocket_is_taken_whatever_library_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.protocols.websockets.auto, "AutoWebSocketsProtocol", object)
    config = server(object()).config
    config.load()
    assert config.ws_protocol_class is None
