"""Bodies that clients compress with gzip or deflate reach the routes as they were before."""

import asyncio
import zlib
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokasaurus.server.errors import InvalidRequest, UnsupportedEncoding, error_response, shorten

PART_BYTES = 1 << 18
"""Most bytes that one message has: a small body may become a thousand times as large, and its reader stops at a
limit."""
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 31, 15, -15  # zlib's names of the formats


class CompressedBodyMiddleware:
    """Decompresses bodies as they are read, in parts of PART_BYTES: routes know their own limits of bytes.

    Other encodings are answered with 415. A damaged body raises InvalidRequest in `receive`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = ",".join(Headers(scope=scope).getlist("content-encoding")) if scope["type"] == "http" else ""
        encodings = [name for part in named.split(",") if (name := part.strip().lower()) not in ("", "identity")]
        if not encodings:
            await self._app(scope, receive, send)
        elif len(encodings) > 1 or encodings[0] not in ("gzip", "x-gzip", "deflate"):
            error = UnsupportedEncoding(
                f"the body is compressed with {shorten(named)!r}: it may be sent as it is, or with gzip or deflate"
            )
            await error_response(error)(scope, receive, send)
        else:
            # the announced length is the compressed body's
            dropped = (b"content-encoding", b"content-length")
            headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
            body = _Body(receive, Decompressor(is_gzip=encodings[0] != "deflate"))
            await self._app({**scope, "headers": headers}, body.receive, send)


class Decompressor:
    """Feed it a compressed body. Raises InvalidRequest in both methods if the body is damaged."""

    def __init__(self, is_gzip: bool) -> None:
        """is_gzip: else deflate, which some clients send without zlib's header."""
        self._name = "gzip" if is_gzip else "deflate"
        self._bits: int | None = _GZIP_BITS if is_gzip else None
        self._stream = zlib.decompressobj(_GZIP_BITS)
        self._has_begun = False

    def parts(self, content: bytes) -> Iterator[bytes]:
        """What the next bytes of the body become, each part as it is asked for."""
        part = b""
        while content or len(part) == PART_BYTES:  # then more may be waiting in the stream
            if content and self._stream.eof and self._bits == _GZIP_BITS:  # of several files, joined
                self._stream = zlib.decompressobj(_GZIP_BITS)
            elif content and self._stream.eof:
                raise InvalidRequest(f"the body goes on after the end of its {self._name} data")
            elif self._bits is None:
                self._bits = _ZLIB_BITS if content[0] & 0x0F == zlib.DEFLATED else _RAW_BITS
                self._stream = zlib.decompressobj(self._bits)
            self._has_begun = True
            try:
                part = self._stream.decompress(content, PART_BYTES)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not valid {self._name}: {error}") from None
            content = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            if part:
                yield part

    def finish(self) -> None:
        """Call it after the last bytes. An empty body is one that was not compressed."""
        if self._has_begun and not self._stream.eof:
            raise InvalidRequest(f"the body ends before the end of its {self._name} data")


class _Body:
    def __init__(self, receive: Receive, decompressor: Decompressor) -> None:
        self._receive = receive
        self._decompressor = decompressor
        self._parts: Iterator[bytes] = iter(())
        self._is_whole = self._has_ended = False

    async def receive(self) -> Message:
        """The next ASGI message; other tasks run before each part. If it is cancelled, nothing is lost."""
        await asyncio.sleep(0)
        while not self._has_ended:
            part = next(self._parts, None)
            if part is not None:
                return {"type": "http.request", "body": part, "more_body": True}
            if self._is_whole:
                self._decompressor.finish()
                self._has_ended = True
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._parts = self._decompressor.parts(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
        return await self._receive()
