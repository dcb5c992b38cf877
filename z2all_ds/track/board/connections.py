"""A limit of the board's open connections, so that idle ones cannot use up the process's file handles.

Anyone who reaches the port can open connections and never finish a request. Over the limit, the one that has been quiet
for longest is closed; connections whose request is being answered come last.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 128
"""A browser opens up to six per page. Many systems allow a process 1,024 file handles, some 256."""


class LimitedConnection(H11Protocol):
    """A connection of uvicorn's server."""

    last_data_seconds = 0.0
    """By the clock of the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.last_data_seconds = self.loop.time()
        others = [one for one in self.connections if isinstance(one, LimitedConnection) and one is not self]
        if len(others) >= MOST_CONNECTIONS:
            quietest = min(others, key=lambda one: (one.is_answering, one.last_data_seconds))
            self.connections.discard(quietest)  # it counts until the event loop has closed it
            quietest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.last_data_seconds = self.loop.time()
        super().data_received(data)

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete
