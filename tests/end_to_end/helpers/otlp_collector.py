"""A collector of OpenTelemetry in this process: takes spans over HTTP, as protobuf."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.end_to_end.helpers.toka_process import wait_for


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """"" for a span without a parent."""
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        """Of all requests."""
        self.paths: list[str] = []
        self.answers = threading.Event()
        """Cleared: requests are read and wait."""
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[ReceivedSpan]:
        found = []
        for body in list(self.bodies):
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _values(of_resource.resource.attributes)
                spans = [span for of_scope in of_resource.scope_spans for span in of_scope.spans]
                found += [
                    ReceivedSpan(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _values(span.attributes),
                        resource,
                    )
                    for span in spans
                ]
        return found

    def spans_of(self, trace_id: str, num_spans: int) -> list[ReceivedSpan]:
        """The spans of a trace, by their start; waits until there are so many."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans() if span.trace_id == trace_id]

        wait_for(lambda: len(found()) >= num_spans, 30)
        return sorted(found(), key=lambda span: (span.start_ns, -span.end_ns))


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.answers.wait(60)
        self.server.paths.append(self.path)
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        collector.shutdown()
        collector.server_close()
