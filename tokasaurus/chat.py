"""`toka chat`: a conversation in the terminal, with a running server or with processes of its own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tokasaurus.flags import Setting, count, flag
from tokasaurus.running_server import AddressConfig, NotAnswered, client_of, explained, name_of_server

if TYPE_CHECKING:
    from openai import OpenAI

_HELP = """\
/clear        forget the conversation
/system TEXT  instructions for the model; without a text, none
/quit         end, as Ctrl-D does
Ctrl-C stops an answer."""
_PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatConfig(AddressConfig):
    """The flags of `toka chat`, checked by `finalize`."""

    model: str | None = flag(
        None,
        "model to load in processes of its own, which end with the conversation; with base_url= or unix_socket=, the "
        "model's name there",
        none_means="that of the running server",
        heading="chat",
        variables=("TOKA_CHAT_MODEL",),
    )
    system: str | None = flag(None, "instructions for the model, before the conversation")
    max_tokens: int | None = count(None, "maximum tokens per answer", none_means="server default")
    temperature: float | None = flag(
        None, "0 always picks the most likely token", minimum=0, none_means="the model's own"
    )

    @classmethod
    def relevant(cls, settings: dict[str, Setting]) -> dict[str, Setting]:
        """Beside a model of its own, variables and files may name a server's address."""
        if "model" not in settings or "base_url" in settings or "unix_socket" in settings:
            return settings
        return {
            name: one for name, one in settings.items() if not one.source or name not in ("host", "port", "api_key")
        }


def chat(config: ChatConfig) -> int:
    """Converse until the input ends. Returns the exit code: 1, with one line on stderr, if nobody answers.

    Input that is no terminal is one message: its answer is printed, and nothing else."""
    from tokasaurus.library.engine import EngineError

    try:
        with _connected(config) as (address, model), client_of(address) as client:
            conversation = _Conversation(client, address, config, model)
            return conversation.run() if sys.stdin.isatty() else conversation.answer_input()
    except (NotAnswered, EngineError) as error:
        print(f"toka chat: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, EngineError) else 1
    except KeyboardInterrupt:  # while the model is loaded or the server sought
        print("toka chat: stopped", file=sys.stderr)
        return 1


@contextmanager
def _connected(config: ChatConfig) -> Iterator[tuple[AddressConfig, str]]:
    """The server that answers, and the model's name there. Raises EngineError if one of its own does not start."""
    if config.model is None or config.base_url is not None or config.unix_socket is not None:
        yield config, config.model or "default"
        return
    from tokasaurus.library.engine import PrivateEngine

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    engine = PrivateEngine([f"model={config.model}", "log_level=warning", "uvicorn_log_level=warning"], show)
    try:
        engine.start()
        yield AddressConfig.parse([f"unix_socket={engine.socket_path}"]), "default"
    finally:
        engine.close()


class _Conversation:
    def __init__(self, client: "OpenAI", address: AddressConfig, config: ChatConfig, model: str) -> None:
        self._client = client
        self._address = address
        self._options: dict[str, Any] = {"model": model}
        if config.max_tokens is not None:
            self._options["max_tokens"] = config.max_tokens
        if config.temperature is not None:
            self._options["temperature"] = config.temperature
        self._system = config.system
        self._messages: list[dict[str, str]] = []
        """Messages of user and assistant, in turn."""
        is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._dim, self._plain = (_DIM, _PLAIN) if is_colored else ("", "")

    def answer_input(self) -> int:
        """Raises NotAnswered."""
        self._messages.append({"role": "user", "content": sys.stdin.read().rstrip("\n")})
        for text, is_reasoning in self._ask():
            if not is_reasoning:
                print(text, end="", flush=True)
        print()
        return 0

    def run(self) -> int:
        """Raises NotAnswered if there is no server at the beginning."""
        with suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited, and earlier ones are found by the arrow keys)

        print(f"{self._model_there()} at {name_of_server(self._address)}; /help lists commands, Ctrl-D ends")
        while True:
            try:
                line = input(_PROMPT).strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\nCtrl-D or /quit ends")
                continue
            if line in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._converse(line)

    def _model_there(self) -> str:
        """The name of the model that answers. Raises NotAnswered if no server does; some list no models."""
        import openai

        name = str(self._options["model"])
        with explained(self._address):
            try:
                models = self._client.models.list().data
            except openai.APIStatusError:
                return name
        return models[0].id if name == "default" and models else name

    def _obey(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/clear":
            self._messages.clear()
            print("the conversation is forgotten")
        elif name == "/system":
            self._system = text.strip() or None
            print("no instructions" if self._system is None else "the instructions hold from the next message on")
        else:
            print(_HELP if name == "/help" else f"{name}: no such command\n{_HELP}")

    def _converse(self, text: str) -> None:
        """Ask, and print the answer as it arrives. A stopped answer stays in the conversation as far as it came; of one
        that failed, nothing does."""
        self._messages.append({"role": "user", "content": text})
        answer, was_reasoning = "", False
        try:
            for part, is_reasoning in self._ask():
                if is_reasoning != was_reasoning:
                    print(self._dim if is_reasoning else f"{self._plain}\n", end="")
                was_reasoning = is_reasoning
                answer += "" if is_reasoning else part
                print(part, end="", flush=True)
            print(self._plain)
        except KeyboardInterrupt:
            print(f"{self._plain}\n{self._dim}(stopped){self._plain}")
        except NotAnswered as error:
            print(f"{self._plain}\n{error}", file=sys.stderr)
            self._messages.pop()
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _ask(self) -> Iterator[tuple[str, bool]]:
        """The answer's parts, and whether each is reasoning. Raises NotAnswered."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages: Any = [*system, *self._messages]
        with explained(self._address):
            chunks: Any = self._client.chat.completions.create(messages=messages, stream=True, **self._options)
            with chunks:  # closed when the user stops the answer, so that the server stops too
                for chunk in chunks:
                    for choice in chunk.choices[:1]:
                        delta = choice.delta
                        reasoning = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
                        if reasoning:
                            yield reasoning, True
                        if delta.content:
                            yield delta.content, False
