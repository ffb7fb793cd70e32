"""`toka ping`: one request to a running server, printed with its timing."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokasaurus.addresses import URL_OF_SOCKETS, client_of_socket, proxies_for, proxy_variable
from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagConfig, count, flag

if TYPE_CHECKING:
    from openai import OpenAI


class PingConfig(FlagConfig):
    """The flags of `toka ping`, checked by `finalize`."""

    prompt: str | None = flag(None, "text to send", none_means="required", heading="request")
    chat: bool = flag(False, "send the prompt as a chat message instead of text to continue")
    max_tokens: int | None = count(None, "maximum tokens per answer", none_means="server default")
    n: int = count(1, "number of answers")
    temperature: float = flag(
        0.2, "0 picks the most likely token; at 1, the API's default, small models ramble", minimum=0
    )
    host: str = flag("127.0.0.1", "address of the server", heading="server")
    port: int = flag(ServerConfig.port, "TCP port of the server", minimum=1, maximum=65535)
    unix_socket: str | None = flag(None, "file of the server's Unix socket, replaces host and port")
    base_url: str | None = flag(None, "URL of any OpenAI-compatible API, replaces host and port")
    model: str = flag("default", "model name; default is the served model", variables=("TOKA_SERVED_MODEL_NAME",))
    api_key: str | None = flag(
        None,
        "API key of the server",
        none_means="TOKA_API_KEY or OPENAI_API_KEY",
        variables=("TOKA_API_KEY", "OPENAI_API_KEY"),
        is_secret=True,
    )

    def further_errors(self) -> Iterator[str]:
        if self.prompt is None:
            yield "prompt is missing: toka ping prompt='tell me a joke'"
        if self.unix_socket is not None and self.base_url is not None:
            yield f"unix_socket={self.unix_socket}: either it or base_url= names the server"


def ping(config: PingConfig) -> int:
    """Print the answers, then time and token count. Returns the exit code: 1, with one line on stderr, on failure."""
    import openai

    base_url = _base_url(config)
    server = base_url if config.unix_socket is None else f"unix_socket={config.unix_socket}"
    started = time.perf_counter()
    try:
        # No time limit: the duration is what ping measures.
        with proxies_for(base_url):
            client = openai.OpenAI(
                base_url=base_url,
                api_key=config.api_key or "none",  # the client requires one
                max_retries=0,
                timeout=None,
                http_client=None if config.unix_socket is None else client_of_socket(config.unix_socket),
            )
        with client:
            answers, num_tokens = _ask(client, config)
    except openai.APIStatusError as error:
        return _fail(f"{server} answered {error.status_code}: {_reason(error)}")
    except openai.APIConnectionError as error:
        proxy = proxy_variable(base_url)
        route = server if proxy is None else f"{server} through the proxy of {proxy}"
        return _fail(f"no answer from {route}: {error.__cause__ or error}; is toka running?")
    except Exception as error:  # the client raises various errors for an invalid host or key
        return _fail(f"{server}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        return _fail("stopped")
    seconds = time.perf_counter() - started
    for number, answer in enumerate(answers, start=1):
        print(answer if len(answers) == 1 else f"[{number}] {answer}")
    rate = f", {num_tokens / seconds:.1f} tokens/s" if num_tokens else ""
    print(f"\n{seconds:.2f} s, {num_tokens} tokens{rate}")
    return 0


def _base_url(config: PingConfig) -> str:
    if config.base_url is not None:
        return config.base_url
    if config.unix_socket is not None:
        return f"{URL_OF_SOCKETS}/v1"
    host = f"[{config.host}]" if ":" in config.host else config.host  # IPv6
    return f"http://{host}:{config.port}/v1"


def _ask(client: "OpenAI", config: PingConfig) -> tuple[list[str], int]:
    """The answers in order, and the number of generated tokens."""
    from openai import OpenAIError

    assert config.prompt is not None
    options: dict[str, Any] = {"model": config.model, "n": config.n, "temperature": config.temperature}
    if config.max_tokens is not None:
        options["max_tokens"] = config.max_tokens
    if config.chat:
        chat = client.chat.completions.create(messages=[{"role": "user", "content": config.prompt}], **options)
        if not hasattr(chat, "choices"):  # the client returns any page with status 200
            raise OpenAIError("no OpenAI-compatible API")
        answers = {choice.index: choice.message.content or "" for choice in chat.choices}
        usage = chat.usage
    else:
        completion = client.completions.create(prompt=config.prompt, **options)
        if not hasattr(completion, "choices"):
            raise OpenAIError("no OpenAI-compatible API")
        answers = {choice.index: choice.text for choice in completion.choices}
        usage = completion.usage
    return [answers[index] for index in sorted(answers)], 0 if usage is None else usage.completion_tokens


def _reason(error: Any) -> str:
    """The server's error message, else the start of its response body, in one line."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(message or error.response.text or error.response.reason_phrase).split())[:300]


def _fail(message: str) -> int:
    print(f"toka ping: {message}", file=sys.stderr)
    return 1
