"""`toka chat`: a conversation in the terminal, with a running server or with processes of its own."""

import json
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokasaurus.commands.running_server import (
    AddressConfig,
    NotAnswered,
    Refused,
    client_of,
    explained,
    models_of,
    name_of_server,
    stream_of,
)
from tokasaurus.flags import Setting, count, flag

if TYPE_CHECKING:
    import httpx

_HELP = """\
/retry            answer the last message once more
/system TEXT      instructions for the model; without a text, none
/set NAME VALUE   a field of requests, as in /set temperature 0; without a value the server's own; /set lists all
/save FILE        write the conversation as JSON
/clear            forget the conversation
/quit             end, as Ctrl-D does
Ctrl-C stops an answer."""
_PROMPT = "> "
_OWN_FIELDS = frozenset({"messages", "n", "stream", "stream_options"})
"""Fields of requests that /set may not change: one answer is shown, as it arrives."""
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
    max_tokens: int = count(1024, "maximum tokens per answer, as far as there is room for them")
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


def chat(config: ChatConfig, _words: list[str]) -> int:
    """Converse until the input ends. Returns the exit code. Raises NotAnswered and EngineError if nobody answers.

    Input that is no terminal is one message: its answer is printed, and nothing else."""
    try:
        with _connected(config) as (address, model), client_of(address) as client:
            conversation = _Conversation(client, address, config, model)
            return conversation.run() if sys.stdin.isatty() else conversation.answer_input()
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

    engine = PrivateEngine([f"model={config.model}", "log_level=warning"], show)
    try:
        engine.start()
        yield AddressConfig.parse([f"unix_socket={engine.socket_path}"]), "default"
    finally:
        engine.close()


class _Conversation:
    def __init__(self, client: "httpx.Client", address: AddressConfig, config: ChatConfig, model: str) -> None:
        self._client = client
        self._address = address
        self._model = model
        self._fields: dict[str, Any] = {"max_tokens": config.max_tokens}
        """What a request has beside its messages. Without other fields, the server's settings of sampling hold."""
        if config.temperature is not None:
            self._fields["temperature"] = config.temperature
        self._system = config.system
        self._messages: list[dict[str, str]] = []
        """Messages of user and assistant, in turn."""
        is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._dim, self._plain = (_DIM, _PLAIN) if is_colored else ("", "")

    def answer_input(self) -> int:
        """Raises NotAnswered."""
        message = sys.stdin.read().rstrip("\n")
        if not message.strip():
            print("toka chat: the standard input is empty: it is the message to answer", file=sys.stderr)
            return 2
        self._messages.append({"role": "user", "content": message})
        for text, is_reasoning in self._ask(_Figures()):
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
        name = self._model
        with explained(self._address):
            try:
                models = models_of(self._client)
            except Refused:
                return name
        return str(models[0].get("id", name)) if name == "default" and models else name

    def _obey(self, line: str) -> None:
        name, _, text = line.partition(" ")
        text = text.strip()
        if name == "/retry":
            self._retry()
        elif name == "/set":
            self._set(*text.split(None, 1))
        elif name == "/save":
            self._save(text)
        elif name == "/clear":
            self._messages.clear()
            print("the conversation is forgotten")
        elif name == "/system":
            self._system = text or None
            print("no instructions" if self._system is None else "the instructions hold from the next message on")
        else:
            print(_HELP if name == "/help" else f"{name}: no such command\n{_HELP}")

    def _retry(self) -> None:
        if self._messages and self._messages[-1]["role"] == "assistant":
            del self._messages[-1]
        if self._messages:
            self._converse(self._messages.pop()["content"])
        else:
            print("there is no message yet")

    def _set(self, name: str = "", text: str = "") -> None:
        if not name:
            print(*(f"{field} {json.dumps(value)}" for field, value in self._fields.items()), sep="\n")
        elif name in _OWN_FIELDS:
            print(f"{name} is set by the conversation itself")
        elif not text:
            self._fields.pop(name, None)
            print(f"{name} is the server's own")
        else:
            try:
                self._fields[name] = json.loads(text)
            except ValueError:
                self._fields[name] = text
            print(f"{name} is {json.dumps(self._fields[name])} from the next message on")

    def _save(self, name: str) -> None:
        try:
            content = json.dumps({"messages": self._all_messages()}, ensure_ascii=False, indent=2).encode()
            with Path(name).expanduser().open("xb") as file:
                file.write(content + b"\n")
            print(f"saved: {name}")
        except OSError as error:  # such as a file that is there
            print(f"{name or 'a name of a file is missing'}: {error.strerror}", file=sys.stderr)
        except (ValueError, RuntimeError) as error:  # a message that is not UTF-8; the home of a user who is not there
            print(f"{name}: {error}", file=sys.stderr)

    def _converse(self, text: str) -> None:
        """Ask, and print the answer as it arrives. A stopped answer stays in the conversation as far as it came; of one
        that failed, nothing does."""
        self._messages.append({"role": "user", "content": text})
        answer, was_reasoning = "", False
        lines, figures = _Lines(shutil.get_terminal_size().columns), _Figures()
        try:
            for part, is_reasoning in self._ask(figures):
                if is_reasoning != was_reasoning:
                    print(lines.rest(), self._dim if is_reasoning else f"{self._plain}\n", sep="", end="")
                was_reasoning = is_reasoning
                answer += "" if is_reasoning else part
                print(lines.add(part), end="", flush=True)
            print(f"{lines.rest()}{self._plain}")
            if figures.text:
                print(f"{self._dim}({figures.text}){self._plain}")
        except KeyboardInterrupt:
            print(f"{lines.rest()}{self._plain}\n{self._dim}(stopped){self._plain}")
        except NotAnswered as error:
            print(f"{lines.rest()}{self._plain}\n{error}", file=sys.stderr)
            self._messages.pop()
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _all_messages(self) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _ask(self, figures: "_Figures") -> Iterator[tuple[str, bool]]:
        """The answer's parts, and whether each is reasoning. Raises NotAnswered."""
        # Closed when the user stops the answer, so that the server stops too
        with explained(self._address), closing(self._chunks()) as chunks:
            for chunk in chunks:
                figures.add(chunk)
                for choice in chunk["choices"][:1]:
                    delta = choice["delta"]
                    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield reasoning, True
                    if delta.get("content"):
                        yield delta["content"], False

    def _chunks(self) -> Generator[dict[str, Any], None, None]:
        """The chunks of an answer. Where a conversation has become so long that max_tokens are too many, the server
        gives what room there is."""
        asked = {"model": self._model, "messages": self._all_messages(), "stream": True}
        asked["stream_options"] = {"include_usage": True}
        try:
            yield from stream_of(self._client, "chat/completions", asked | self._fields)
        except Refused as error:
            if error.code != "context_length_exceeded" or "max_tokens" not in self._fields:
                raise
            fields = {name: value for name, value in self._fields.items() if name != "max_tokens"}
            yield from stream_of(self._client, "chat/completions", asked | fields)


class _Figures:
    """Tokens and times of one answer."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._is_cut = False
        self.text = ""
        """In words; "" if the server has not told the number of tokens."""

    def add(self, chunk: Any) -> None:
        self._is_cut = self._is_cut or any(choice.get("finish_reason") == "length" for choice in chunk["choices"])
        if num_tokens := (chunk.get("usage") or {}).get("completion_tokens"):
            rate = num_tokens / (time.perf_counter() - self._started_s)
            cut = "; cut at max_tokens, which /set changes" if self._is_cut else ""
            self.text = f"{num_tokens} tokens, {rate:.1f} tokens/s{cut}"


class _Lines:
    """Breaks text that arrives in parts into lines, between words."""

    def __init__(self, width: int) -> None:
        """width: of the terminal, in columns."""
        self._width = width
        self._column = 0
        self._spaces = self._word = ""

    def add(self, text: str) -> str:
        """What can be shown now: all but the last word, which may go on."""
        shown = []
        for character in text:
            if character == "\n":
                shown += [self.rest(), character]
                self._column = 0
            elif character == " ":
                shown.append(self._finish_word())
                self._spaces += character
            else:
                self._word += character
                if _columns(character) == 2 or len(self._word) >= self._width:  # no spaces are between such words
                    shown.append(self._finish_word())
        return "".join(shown)

    def rest(self) -> str:
        """What `add` has kept back."""
        shown = self._finish_word() + self._spaces
        self._column += len(self._spaces)
        self._spaces = ""
        return shown

    def _finish_word(self) -> str:
        columns = sum(map(_columns, self._word))
        if not columns:
            return ""
        if self._column and self._column + len(self._spaces) + columns > self._width:
            self._spaces, self._column = "\n", -1
        shown = self._spaces + self._word
        self._column += len(self._spaces) + columns
        self._spaces = self._word = ""
        return shown


def _columns(character: str) -> int:
    """Of a terminal."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
