"""multipart/form-data as it arrives: small fields as text, and a file in parts."""

import logging
from typing import Protocol

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from tokasaurus.server.errors import InvalidRequest, shorten

# It logs a warning for each malformed body, which its client is told.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

FILE_FIELD = "file"
MAX_FIELD_BYTES = 1024
# The same limit for the content-type of a body; parsing takes time in the square of the quotes in it.
MAX_HEADER_BYTES = 4096
_MAX_BOUNDARY_CHARS = 200


class FormReceiver(Protocol):
    """What a form consists of, in the order of its parts. Whatever a method raises ends the reading."""

    def add_field(self, name: str, value: str) -> None:
        """A part that is no file."""

    def begin_file(self, filename: str) -> None:
        """The part FILE_FIELD begins."""

    def write(self, content: bytes) -> None:
        """The next bytes of the file."""


class FormReader:
    """Feed it a body. Raises InvalidRequest in all its methods if the body is malformed."""

    def __init__(self, content_type: str, receiver: FormReceiver) -> None:
        """content_type: the header of the request."""
        self._receiver = receiver
        self._name = ""
        """Name of the part that is being read."""
        self._is_file = False
        self._value = bytearray()
        self._header_name, self._header_value = bytearray(), bytearray()
        self._num_header_bytes = 0
        self._disposition: bytes | None = None
        self._is_complete = False
        callbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_name,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        self._parser = MultipartParser(_boundary(content_type), callbacks)  # type: ignore[arg-type]

    def feed(self, content: bytes) -> None:
        """The next bytes of the body."""
        try:
            self._parser.write(content)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not valid multipart/form-data: {error}") from None

    def finish(self) -> None:
        """Call it after the last bytes."""
        if not self._is_complete:
            raise InvalidRequest("the body ends before the last boundary of multipart/form-data")

    def _on_part_begin(self) -> None:
        self._disposition = None
        self._num_header_bytes = 0

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header_bytes(end - start)
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header_bytes(end - start)
        self._header_value += data[start:end]

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise InvalidRequest(f"the headers of a part may have at most {MAX_HEADER_BYTES} bytes")

    def _on_header_end(self) -> None:
        name, value = bytes(self._header_name).lower(), bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()
        if name == b"content-disposition":
            self._disposition = value
        elif name == b"content-transfer-encoding" and value.strip().lower() not in (b"binary", b"8bit", b"7bit"):
            raise InvalidRequest(f"a part may not be encoded ({shorten(_text(value))!r})")

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest('each part needs the header content-disposition: form-data; name="..."')
        self._name = _text(options[b"name"])
        self._is_file = self._name == FILE_FIELD
        self._value.clear()
        if not self._is_file:
            return
        filename = _text(options.get(b"filename", b""))
        if not filename:
            raise InvalidRequest(f"the part {FILE_FIELD} must be a file with a name", FILE_FIELD)
        self._receiver.begin_file(filename)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._receiver.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            name = shorten(self._name)
            raise InvalidRequest(f"{name} may have at most {MAX_FIELD_BYTES} bytes", name)

    def _on_part_end(self) -> None:
        if not self._is_file:
            self._receiver.add_field(self._name, _text(bytes(self._value)))

    def _on_end(self) -> None:
        self._is_complete = True


def _boundary(content_type: str) -> bytes:
    if len(content_type) > MAX_HEADER_BYTES:
        raise InvalidRequest(f"the header content-type may have at most {MAX_HEADER_BYTES} characters")
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 1 <= len(boundary) <= _MAX_BOUNDARY_CHARS:
        limit = f"1 to {_MAX_BOUNDARY_CHARS} characters"
        raise InvalidRequest(f"the header content-type must be multipart/form-data; boundary=... ({limit})")
    return boundary


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
