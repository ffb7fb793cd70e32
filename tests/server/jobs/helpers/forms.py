"""Bodies of multipart/form-data, byte by byte, and batch files."""

import orjson

BOUNDARY = "b0undary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def part(content: bytes, headers: str) -> bytes:
    """headers: each with its line end."""
    return f"--{BOUNDARY}\r\n{headers}\r\n".encode() + content + b"\r\n"


def field_part(name: str, value: str) -> bytes:
    return part(value.encode(), f'Content-Disposition: form-data; name="{name}"\r\n')


def file_part(content: bytes, filename: str = "a.jsonl", name: str = "file") -> bytes:
    disposition = f'form-data; name="{name}"; filename="{filename}"'
    return part(content, f"Content-Disposition: {disposition}\r\nContent-Type: application/jsonl\r\n")


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


PURPOSE = field_part("purpose", "batch")


def batch_line(custom_id: str, url: str = "/v1/completions", **fields: object) -> bytes:
    """A line that runs quickly, or one that cannot, by the fields of its body."""
    body = {"model": "default", "prompt": "hello", "max_tokens": 2} | fields
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + b"\n"
