"""Traces of requests for OpenTelemetry: a span for a request of HTTP, and below it queue, prefill and decode.

Spans are built when times are known and handed to a queue; a thread of the SDK sends them. A full queue drops spans, so
that no request waits for a collector. Attributes follow the GenAI semantic conventions; none has text of a client.
OpenTelemetry is only imported where the flag asks for it: it is an extra of the package.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta

MAX_SEQUENCES = 16
"""Sequences of one HTTP request that have spans of their own: it may have tens of thousands."""

CLOSE_SECONDS = 2.0
"""Longest wait at the end of the server for spans that are not sent yet."""

_PATH = "/v1/traces"
_PROVIDER = "tokasaurus"

Attributes = dict[str, Any]


class RequestTracer:
    """Sends the spans of one server to a collector, over HTTP with protobuf (OTLP).

    Variables of OpenTelemetry's SDK apply: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and others.
    """

    def __init__(self, endpoint: str, model: str, version: str, operations: Mapping[str, str]) -> None:
        """endpoint: base URL of the collector. model: the served name. operations: path of a route that generates → its
        gen_ai.operation.name."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint.rstrip("/")
        self._processor = BatchSpanProcessor(OTLPSpanExporter(url if url.endswith(_PATH) else url + _PATH))
        resource = Resource.create({"service.version": version})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # no variable gives another
            resource = resource.merge(Resource({"service.name": _PROVIDER}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer(_PROVIDER, version)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._operations = operations

    def begin(self, method: str, route: str, headers: Iterable[tuple[bytes, bytes]]) -> "RequestSpan":
        """The span of an HTTP request that has just arrived: a child of the client's, if it sent a traceparent."""
        from opentelemetry.trace import SpanKind

        carrier = {
            name: value.decode("latin-1")
            for name, value in ((key.decode("latin-1"), value) for key, value in headers)
            if name in ("traceparent", "tracestate")
        }
        span = self._tracer.start_span(
            f"{method} {route}",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
        )
        return RequestSpan(self._tracer, span, self._model, self._operations.get(route))

    def close(self) -> None:
        """Sends what is left, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True, name="close traces")
        closing.start()
        closing.join(CLOSE_SECONDS)


class RequestSpan:
    """The span of one HTTP request. All methods do nothing once it has ended, or if the sampler leaves it out."""

    def __init__(self, tracer: Any, span: Any, model: str, operation: str | None) -> None:
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._is_recording: bool = span.is_recording()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._attributes: Attributes = {"gen_ai.provider.name": _PROVIDER, "gen_ai.response.model": model}
        self._num_requests = 0
        self._num_sequences = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0
        self._reasons: list[str] = []
        self._context: Any = None

    @property
    def is_open(self) -> bool:
        return self._is_recording

    def note_request(self, request: GenerateRequest) -> None:
        """A prompt of this HTTP request goes to the engine."""
        if not self._is_recording:
            return
        self._num_requests += 1
        self._num_prompt_tokens += len(request.prompt_ids)
        if self._num_requests == 1 and self._operation is not None:
            self._attributes |= {
                "gen_ai.operation.name": self._operation,
                "gen_ai.request.model": self._attributes["gen_ai.response.model"],
                "gen_ai.request.choice.count": request.num_sequences,
                "gen_ai.request.max_tokens": request.max_new_tokens,
            }
            defaults = request.sampling._field_defaults
            for name, value in request.sampling._asdict().items():
                if value != defaults[name]:
                    self._attributes[f"gen_ai.request.{name}"] = value

    def note_sequence(self, request: GenerateRequest, delta: SequenceDelta) -> None:
        """delta: the last of a sequence of one of the requests."""
        if not self._is_recording:
            return
        self._num_sequences += 1
        self._num_cached_tokens += delta.num_cached_tokens
        reason = "error" if delta.error else str(delta.finish_reason)
        if len(self._reasons) < MAX_SEQUENCES:
            self._reasons.append(reason)
        times = delta.times
        if times is None:
            return
        self._num_completion_tokens += times.num_tokens
        if self._num_sequences > MAX_SEQUENCES:
            return
        names: Attributes = {"toka.request.id": request.request_id, "toka.sample": delta.sequence_index}
        admitted_s = times.admitted_s or times.ended_s
        self._add("queue", request.arrived_s or admitted_s, admitted_s, names)
        if not times.admitted_s:
            return
        prompt = {
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "gen_ai.usage.cache_read.input_tokens": delta.num_cached_tokens,
        }
        self._add("prefill", times.admitted_s, times.first_token_s or times.ended_s, names | prompt)
        if times.first_token_s:
            completion = {
                "gen_ai.usage.output_tokens": times.num_tokens,
                "gen_ai.response.finish_reasons": [reason],
                "toka.recomputed_tokens": delta.num_recomputed_tokens,
            }
            self._add("decode", times.first_token_s, times.ended_s, names | completion)

    def _add(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """A span below this one. start_s, end_s: by time.monotonic."""
        if self._context is None:
            from opentelemetry.trace import set_span_in_context

            self._context = set_span_in_context(self._span)
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=self._epoch_ns + int(start_s * 1e9)
        )
        span.end(self._epoch_ns + int(end_s * 1e9))

    def end(self, status: int) -> None:
        """status: of the HTTP answer."""
        if not self._is_recording:
            return
        self._is_recording = False
        attributes: Attributes = {"http.response.status_code": status}
        if self._num_requests:
            attributes |= self._attributes
            attributes |= {
                "gen_ai.usage.input_tokens": self._num_prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
                "gen_ai.response.finish_reasons": self._reasons,
                "toka.prompts": self._num_requests,
                "toka.sequences": self._num_sequences,
            }
        if status >= 500:
            from opentelemetry.trace import StatusCode

            attributes["error.type"] = str(status)
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes(attributes)
        self._span.end()


current_span: ContextVar[RequestSpan | None] = ContextVar("request_span", default=None)
"""Span of the HTTP request that runs in this context; the tasks of its lines inherit it."""
