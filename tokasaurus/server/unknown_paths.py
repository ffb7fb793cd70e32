"""Paths that this server lacks and others have: what the 404 says that a client may use instead."""

import difflib
import re
from collections.abc import Sequence

_CHAT, _COMPLETIONS, _MODELS = "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"
_CHAT_OF_BASE_URL = f"use {_CHAT} of OpenAI's API, with the base URL http://HOST:PORT/v1"
_TEXT_ONLY = f"this server generates text only: use a server of such models; text is at {_CHAT}"
_RL = "it is one of the routes for roll-outs, which the flag rl=T serves"

OTHER_SERVERS: tuple[tuple[str, str, str], ...] = (
    (
        "OpenAI: embeddings",
        "(v1/)?(engines/[^/]+/)?embeddings?",
        f"this server makes no embeddings: use a server of an embedding model; text is at {_CHAT}",
    ),
    ("OpenAI: speech, images, video", "(v1/)?(audio|images|videos|realtime)(/.*)?", _TEXT_ONLY),
    (
        "OpenAI: moderations",
        "(v1/)?moderations",
        f"ask the model for a verdict by {_CHAT}, whose response_format enforces a schema",
    ),
    (
        "OpenAI: fine-tuning",
        "(v1/)?fine[_-]tun(ing|es)(/.*)?",
        "this server trains no models; a server with rl=T takes new weights from a trainer",
    ),
    ("OpenAI: uploads in parts", "(v1/)?uploads(/.*)?", "POST /v1/files takes a whole file"),
    (
        "OpenAI: what it stores or evaluates",
        "(v1/)?(assistants|threads|vector_stores|conversations|containers|evals|chatkit|organization)(/.*)?",
        f"this server keeps no state but files and batches: send the history to {_CHAT}",
    ),
    ("OpenAI: older routes", "(v1/)?(edits|engines(/.*)?)", f"use {_CHAT}; {_MODELS} lists what is served"),
    ("Azure", "openai/.*", _CHAT_OF_BASE_URL),
    ("Anthropic: batches", "(v1/)?messages/batches(/.*)?", "use POST /v1/bulk, or POST /v1/batches of OpenAI's API"),
    ("Anthropic: older route", "(v1/)?complete", f"use {_COMPLETIONS}"),
    ("Gemini", "v1beta/.*", _CHAT_OF_BASE_URL),
    ("Cohere", "v[12]/(chat|generate)", _CHAT_OF_BASE_URL),
    ("Ollama: chat", "(v1/)?api/chat", f"this server has OpenAI's API, not Ollama's: use {_CHAT}"),
    ("Ollama: completion", "(v1/)?api/generate", f"this server has OpenAI's API, not Ollama's: use {_COMPLETIONS}"),
    ("Ollama: models", "(v1/)?api/(tags|show|ps)", f"this server has OpenAI's API, not Ollama's: use {_MODELS}"),
    (
        "Ollama: embeddings",
        "(v1/)?api/embed(dings)?",
        "this server makes no embeddings: use a server of an embedding model",
    ),
    ("Ollama: version", "(v1/)?api/version", "use GET /version"),
    (
        "Ollama: changes of models",
        "(v1/)?api/(pull|push|create|copy|delete|blobs(/.*)?)",
        "this server serves one model, which its flag model= names",
    ),
    ("Open WebUI, LM Studio, OpenRouter", "api/v[01]/.*", _CHAT_OF_BASE_URL),
    (
        "fill in the middle",
        "(v1/)?(fim/completions|infill)",
        f"use {_COMPLETIONS}, with the model's own tokens for prefix, suffix and middle in the prompt",
    ),
    (
        "rerank, score, classify, pool",
        "(v[12]/)?(rerank|reranking|score|classify|pooling|predict|embed|embed_sparse)",
        f"this server generates text only: use a server of such models; by {_COMPLETIONS} with echo and logprobs, the "
        "model gives the log-probabilities of a text",
    ),
    ("llama.cpp: completion", "completion", f"use {_COMPLETIONS}"),
    ("llama.cpp: server", "(props|slots|lora-adapters)(/.*)?", f"use {_MODELS}, and GET /metrics"),
    (
        "llama.cpp, vLLM: template",
        "(apply-template|(v1/)?chat/completions/render)",
        "POST /tokenize shows the token ids of messages, and POST /detokenize their text",
    ),
    ("TGI", "(generate_stream|info)", f"use {_CHAT} with stream=true, and {_MODELS}"),
    ("SageMaker", "invocations", f"use {_CHAT}"),
    (
        "SGLang, vLLM: roll-outs",
        "(generate|inference/v1/generate|get_model_info|model_info|get_server_info|server_info|"
        "flush_cache|pause|resume|sleep|wake_up|pause_generation|continue_generation|abort_request|update_weights|"
        "update_weights_from_disk|reset_prefix_cache)",
        _RL,
    ),
)
"""(whose path it is, regular expression of the path without its first slash, what to use)"""
_PATTERNS = [(re.compile(pattern), advice) for _, pattern, advice in OTHER_SERVERS]
_LONGEST_PATH = 100


def what_to_use(path: str, known: Sequence[str]) -> str | None:
    """What to use in place of a path that no route has; None if nothing is known. known: paths of the routes."""
    advice = next((advice for pattern, advice in _PATTERNS if pattern.fullmatch(path.removeprefix("/"))), None)
    if advice is None and len(path) <= _LONGEST_PATH:
        closest = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
        advice = f"did you mean {closest[0]}?" if closest else None
    return advice
