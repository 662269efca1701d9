"""What can go wrong with a request to a server.

ExchangeFailed
+-- ConnectTimedOut     no connection in time
+-- AnswerTimedOut      connected, but what was waited for didn't come in time
+-- ConnectionBroken    refused, unknown, reset, or closed before the answer's end
+-- NotHttp             the answer isn't HTTP/1, or its head exceeds the bound
+-- BadRequest          the request can't be written as HTTP: the fault of whoever made it
"""


class ExchangeFailed(Exception):
    """A request had no answer, or not the whole of it."""


class ConnectTimedOut(ExchangeFailed):
    """No address accepted a connection in time."""


class AnswerTimedOut(ExchangeFailed):
    """The server was too slow."""


class ConnectionBroken(ExchangeFailed):
    """There was no connection, or it ended before the answer did."""


class NotHttp(ExchangeFailed):
    """What came is no HTTP/1 answer."""


class BadRequest(ExchangeFailed):
    """A URL without a host, or a header with a line break."""
