"""Files of requests, and what is in files of results."""

import json
from pathlib import Path
from typing import Any

COMPLETIONS = "/v1/completions"


def request_line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    fields = {"model": "default", "prompt": f"text {custom_id}", "max_tokens": 20, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields}) + "\n"


def write_requests(path: Path, num_lines: int, **body: Any) -> Path:
    """custom ids are c0, c1, ...; each prompt is `text ` and the custom id."""
    path.write_text("".join(request_line(f"c{index}", **body) for index in range(num_lines)))
    return path


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["text"])
