"""HTTP/1.1 towards engines, on httptools and asyncio's transports: just what a gateway needs, at little CPU a request.

`http_client.py` is the door. A request has one `Exchange` (its answer, parsed as it comes) on one `Connection`; what is
idle waits in the `ConnectionPool`. Nothing here knows of engines: `gateway/upstream.py` does.
"""
