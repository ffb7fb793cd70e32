"""`toka ping`: one request to a running server, printed with its timing."""

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from tokasaurus.addresses import proxies_for, proxy_variable
from tokasaurus.flags import MAX_INT32, Flag, FlagError, FlagTable, assign_flags, check_flags

if TYPE_CHECKING:
    from openai import OpenAI

    class Config:  # Pydra has no types
        def finalize(self) -> None: ...
else:
    from pydra import Config


class PingConfig(Config):
    """The flags of `toka ping`, checked by `finalize`."""

    prompt: str | None = None
    chat: bool = False
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 0.2
    host: str = "127.0.0.1"
    port: int = 10210
    base_url: str | None = None
    model: str = "default"
    api_key: str | None = None

    def finalize(self) -> None:
        """Raises FlagError for a wrong value or a missing prompt."""
        check_flags(self, PING_FLAGS)
        if self.prompt is None:
            raise FlagError("prompt is missing: toka ping prompt='tell me a joke'")


PING_FLAGS = FlagTable(
    groups={
        "request": {
            "prompt": Flag("text to send", none_means="required"),
            "chat": Flag("send the prompt as a chat message instead of text to continue"),
            "max_tokens": Flag("maximum tokens per answer", minimum=1, maximum=MAX_INT32, none_means="server default"),
            "n": Flag("number of answers", minimum=1, maximum=MAX_INT32),
            "temperature": Flag(
                "0 picks the most likely token; at 1, the API's default, small models ramble", minimum=0
            ),
        },
        "server": {
            "host": Flag("address of the server"),
            "port": Flag("TCP port of the server", minimum=1, maximum=65535),
            "base_url": Flag("URL of any OpenAI-compatible API, replaces host and port", none_means="none"),
            "model": Flag("model name; default is the served model"),
            "api_key": Flag("API key of the server", none_means="TOKA_API_KEY"),
        },
    }
)


def parse_ping_config(args: list[str]) -> PingConfig:
    """The checked config for `name=value` words. Raises FlagError."""
    config = PingConfig()
    assign_flags(config, PING_FLAGS, args)
    config.finalize()
    return config


def ping(config: PingConfig) -> int:
    """Print the answers, then time and token count. Returns the exit code: 1, with one line on stderr, on failure."""
    import openai

    host = f"[{config.host}]" if ":" in config.host else config.host  # IPv6
    base_url = f"http://{host}:{config.port}/v1" if config.base_url is None else config.base_url
    # An empty variable means no key, but the client requires one.
    api_key = (os.environ.get("TOKA_API_KEY") or "none") if config.api_key is None else config.api_key
    started = time.perf_counter()
    try:
        # No time limit: the duration is what ping measures.
        with proxies_for(base_url):
            client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None)
        with client:
            answers, num_tokens = _ask(client, config)
    except openai.APIStatusError as error:
        return _fail(f"{base_url} answered {error.status_code}: {_reason(error)}")
    except openai.APIConnectionError as error:
        proxy = proxy_variable(base_url)
        route = base_url if proxy is None else f"{base_url} through the proxy of {proxy}"
        return _fail(f"no answer from {route}: {error.__cause__ or error}; is toka running?")
    except Exception as error:  # the client raises various errors for an invalid host or key
        return _fail(f"{base_url}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        return _fail("stopped")
    seconds = time.perf_counter() - started
    for number, answer in enumerate(answers, start=1):
        print(answer if len(answers) == 1 else f"[{number}] {answer}")
    rate = f", {num_tokens / seconds:.1f} tokens/s" if num_tokens else ""
    print(f"\n{seconds:.2f} s, {num_tokens} tokens{rate}")
    return 0


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
