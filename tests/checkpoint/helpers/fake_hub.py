"""A Hugging Face hub with one repository on localhost: the endpoints that snapshot_download uses."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer as BaseTokenizer
from tokenizers import models

from tests.helpers.limits import join

COMMIT = "a" * 40
TOKENIZER = BaseTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).to_str()
"""A tokenizer.json."""


class FakeHub:
    """A running hub."""

    def __init__(self, url: str) -> None:
        self.url = url
        """For HF_ENDPOINT."""
        self.downloaded: list[str] = []
        """Names of files fetched by GET so far."""
        self.gated = False
        """Whether to answer 403, as for gated models."""


@contextmanager
def serve_repository(repo_id: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            if hub.gated:
                self.reply(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            elif path == f"/api/models/{repo_id}/revision/main":
                siblings = [{"rfilename": name} for name in files]
                self.reply_json({"id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings})
            elif path == f"/api/models/{repo_id}/tree/{COMMIT}":
                self.reply_json(
                    [
                        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for name, content in files.items()
                    ]
                )
            elif path.startswith(f"/{repo_id}/resolve/{COMMIT}/") and path.split("/", 5)[5] in files:
                name = path.split("/", 5)[5]
                if self.command == "GET":
                    hub.downloaded.append(name)
                etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
                self.reply(200, files[name], {"ETag": etag, "X-Repo-Commit": COMMIT})
            else:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def reply_json(self, value: object) -> None:
            self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        join(thread)
        server.server_close()


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_SHAPES = {
    "model.embed_tokens.weight": (100, 64),
    "lm_head.weight": (100, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (64, 64),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
}


def weights(*names: str, value: float = 0) -> bytes:
    """A safetensors file with these tensors of CONFIG, by default all that are looked at before a worker starts."""
    return save({name: np.full(_SHAPES[name], value, np.float16) for name in names or _SHAPES})
