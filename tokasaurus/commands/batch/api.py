"""A server's Files and Batches API, OpenAI's or our own with its extensions; while it is gone, calls are repeated."""

import functools
import re
import socket
import ssl
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from tokasaurus.addresses import proxy_variable
from tokasaurus.commands.batch.errors import CommandError, InputRefused, NotOnServer
from tokasaurus.commands.batch.progress import BatchView
from tokasaurus.commands.batch.results import find_custom_id
from tokasaurus.commands.running_server import NotAnswered, Refused, check_status, http_client
from tokasaurus.messages.status import TimeLeft

Answer = TypeVar("Answer")
Value = TypeVar("Value")

MAX_SILENCE_SECONDS = 300.0
"""Longest time without an answer until a run ends."""
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
# Statuses of a server that may answer later. 507: its disk is full.
_MAY_PASS = (408, 429, 500, 502, 503, 504, 507, 529)
_MAX_PER_PAGE = 100
_TIMEOUT_S = 60.0
# Statuses of a server that will never accept this file.
_REFUSES_INPUT = (400, 413, 422)


class _Malformed(Exception):
    """An answer with the status 200 that is not OpenAI's: a page of a proxy, or of another kind of server."""


class BatchApi:
    """One server. Every method raises CommandError if the server refuses, or has not answered for `max_silence_s`."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        note: Callable[[str], None],
        max_silence_s: float,
        is_local: bool,
        unix_socket: str | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """note: shows the user a line. max_silence_s: longest time without an answer. is_local: the server is on this
        machine, so that no proxy is used. unix_socket: replaces host and port of base_url. wait: for so many seconds;
        may raise."""
        self._base_url = base_url if unix_socket is None else f"unix:{unix_socket}/v1"
        """Address of the server in messages."""
        self._note = note
        self._max_silence_s = max_silence_s
        self.wait = wait
        self._has_answered = False
        try:
            self._client = http_client(base_url, api_key, unix_socket, is_local, _TIMEOUT_S)
        except NotAnswered as error:
            raise CommandError(str(error)) from None
        except Exception as error:  # various, for an invalid URL
            raise CommandError(f"base_url={base_url}: {' '.join(str(error).split())}") from None
        proxy = None if is_local else proxy_variable(base_url)
        self._route = self._base_url if proxy is None else f"{base_url} through the proxy of {proxy}"

    def close(self) -> None:
        self._client.close()

    def upload(self, path: Path) -> str:
        """The file's id. Raises InputRefused."""

        def upload() -> str:
            with path.open("rb") as content:
                files = {"file": (path.name, content)}
                return _field(self._ask("POST", "files", files=files, data={"purpose": "batch"}), "id", str)

        return self._persist(upload, refuses_input=True)

    def create(self, file_id: str, endpoint: str, completion_window: str) -> BatchView:
        """A new batch of an uploaded file; the one that exists already, if an answer was lost. Raises InputRefused."""
        is_first = True

        def create() -> BatchView:
            nonlocal is_first
            existing = None if is_first else self._find(file_id)
            is_first = False
            if existing is not None:
                return existing
            body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": completion_window}
            return _read_view(self._ask("POST", "batches", json=body))

        return self._persist(create, refuses_input=True)

    def find(self, file_id: str) -> BatchView | None:
        """The batch of an uploaded file; None if there is none."""
        return self._persist(lambda: self._find(file_id))

    def retrieve(self, batch_id: str) -> BatchView:
        return self._persist(lambda: _read_view(self._ask("GET", f"batches/{batch_id}")))

    def fields(self, batch_id: str) -> dict[str, Any]:
        """The batch as the API has it."""
        return self._persist(lambda: self._ask("GET", f"batches/{batch_id}"))

    def newest(self, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """(batches as the API has them, the newest first, whether there are older ones)."""
        found: list[dict[str, Any]] = []
        while True:
            options: dict[str, Any] = {"after": _field(found[-1], "id", str)} if found else {}
            num_asked = min(_MAX_PER_PAGE, limit - len(found))
            page = self._persist(functools.partial(self._page, num_asked, options))
            batches, has_more = _objects(page), _field(page, "has_more", bool, False)
            found += batches
            if not batches or not has_more or len(found) >= limit:
                return found[:limit], has_more

    def cancel(self, batch_id: str) -> BatchView:
        return self._persist(lambda: _read_view(self._ask("POST", f"batches/{batch_id}/cancel")))

    def results_from(self, batch_id: str, first: int) -> list[bytes]:
        """Results from line `first` on; none if the server cannot give them, or answers with something else.

        Never raises CommandError."""
        import httpx

        try:
            response = self._client.get(f"batches/{batch_id}/results", params={"first": first})
            check_status(response)
        except (httpx.HTTPError, Refused):
            return []
        content = response.content
        return list(takewhile(lambda line: find_custom_id(line) is not None, content.splitlines(keepends=True)))

    def download(self, file_id: str, into: BinaryIO) -> None:
        """Write a file's content, in the place of what was there."""

        def download() -> None:
            into.seek(0)
            into.truncate()
            with self._client.stream("GET", f"files/{file_id}/content") as response:
                check_status(response)
                for part in response.iter_bytes(1 << 20):
                    into.write(part)

        self._persist(download)

    def _find(self, file_id: str) -> BatchView | None:
        page: dict[str, Any] = {"has_more": True}
        options: dict[str, Any] = {}
        while _field(page, "has_more", bool, False):
            page = self._page(_MAX_PER_PAGE, options)
            batches = _objects(page)
            for fields in batches:
                if fields.get("input_file_id") == file_id:
                    return _read_view(fields)
            if not batches:
                break
            options = {"after": _field(batches[-1], "id", str)}
        return None

    def _page(self, limit: int, options: dict[str, Any]) -> dict[str, Any]:
        return self._ask("GET", "batches", params={"limit": limit, **options})

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The fields of the answer. options: of httpx. Raises Refused, _Malformed and httpx's errors."""
        response = self._client.request(method, path, **options)
        check_status(response)
        return _parse(response.content)

    def _persist(self, operation: Callable[[], Answer], refuses_input: bool = False) -> Answer:
        """The operation's answer. It is called again while the server gives none, unless it has never given any and
        what is wrong does not look as if it passed."""
        import httpx

        failed_at_s: float | None = None
        num_failures = 0
        while True:
            try:
                answer = operation()
                self._has_answered = True
                return answer
            except Refused as error:
                self._has_answered = True
                message = f"{self._base_url} {error}"
                if error.status == 404:
                    has_version = re.search("/v1/?$", self._base_url)
                    hint = "" if has_version else " (the URL of an OpenAI API ends in /v1)"
                    raise NotOnServer(message + hint) from None
                if error.status not in _MAY_PASS:
                    is_input = refuses_input and error.status in _REFUSES_INPUT
                    raise (InputRefused if is_input else CommandError)(message) from None
            except httpx.RequestError as error:
                message = f"no answer from {self._route}: {str(error) or type(error).__name__}"
                if not self._has_answered and _will_not_pass(error):
                    raise CommandError(f"{message}; is the server running?") from None
            except httpx.InvalidURL as error:
                raise CommandError(f"{self._base_url}: {' '.join(str(error).split())}") from None
            except OSError as error:  # of the input, or of the file that is written
                raise CommandError(f"{error.filename or 'the results'}: {error.strerror}") from None
            except _Malformed as error:
                raise CommandError(f"{self._base_url}: no OpenAI-compatible API: {error}") from None
            now_s = time.monotonic()
            failed_at_s = now_s if failed_at_s is None else failed_at_s
            if now_s - failed_at_s >= self._max_silence_s:
                raise CommandError(message)
            if num_failures == 1:  # one may be a restart of the server
                self._note(f"{message}; trying again for up to {self._max_silence_s:g} s")
            self.wait(_PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)])
            num_failures += 1


def _will_not_pass(error: BaseException | None) -> bool:
    """Whether a first request failed because nothing listens there, or in a way that no later one can succeed: for a
    URL, a key or a proxy that cannot be used, too."""
    import httpx

    never = (
        httpx.UnsupportedProtocol,
        httpx.LocalProtocolError,
        httpx.ProxyError,
        ConnectionRefusedError,
        ssl.SSLError,
    )
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno != socket.EAI_AGAIN
        if isinstance(error, (ConnectionRefusedError, ssl.SSLError, *never)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _parse(content: bytes) -> dict[str, Any]:
    """The fields of an answer. Raises _Malformed."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise _Malformed("an answer is no JSON object")
    return value


def _field(fields: dict[str, Any], name: str, kind: type[Value], default: Value | None = None) -> Value:
    """The field's value; `default` if it is absent or null. Raises _Malformed."""
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, kind):
        raise _Malformed(f"the field {name} of an answer is no {kind.__name__}")
    return value


def _objects(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of OpenAI's list. Raises _Malformed."""
    objects = _field(fields, "data", list, [])
    if not all(isinstance(one, dict) for one in objects):
        raise _Malformed("a list has something else than objects")
    return objects


def _read_view(fields: dict[str, Any]) -> BatchView:
    """fields: of a batch. Raises _Malformed."""
    counts = _field(fields, "request_counts", dict, {})
    output_tokens = _field(_field(fields, "usage", dict, {}), "output_tokens", int, 0)
    progress = _field(fields, "progress", dict, {})
    files = [_field(fields, name, str, "") for name in ("output_file_id", "error_file_id")]
    return BatchView(
        id=_field(fields, "id", str),
        status=_field(fields, "status", str),
        num_lines=_field(counts, "total", int, 0),
        num_completed=_field(counts, "completed", int, 0),
        num_failed=_field(counts, "failed", int, 0),
        output_tokens=output_tokens,
        errors=_objects(_field(fields, "errors", dict, {})),
        result_file_ids=[file_id for file_id in files if file_id],
        model=_field(fields, "model", str, ""),
        num_generated=_field(progress, "generated_tokens", int, output_tokens),
        num_expected=_field(progress, "expected_tokens", int, -1) if "expected_tokens" in progress else None,
        tells_progress=bool(progress),
        time_left=_time_left(_field(progress, "seconds_left", list, [])),
        problem=_field(fields, "problem", str, ""),
    )


def _time_left(seconds: list[Any]) -> TimeLeft | None:
    """Raises _Malformed."""
    if not seconds:
        return None
    if len(seconds) != 2 or not all(isinstance(end_s, int | float) for end_s in seconds):
        raise _Malformed("seconds_left")
    return TimeLeft(*seconds)
