"""Chat templates that requests bring: rendered in child processes, with limits of time and memory."""

import logging
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import orjson

from tokasaurus.server.child_process import PACKAGE_PARENT
from tokasaurus.server.errors import TemplateRendererFailed
from tokasaurus.server.templates.render_process import ERRORS
from tokasaurus.server.tools.reasoning import marks_in
from tokasaurus.server.tools.support import ToolSupport, tool_support_of
from tokasaurus.text.exact_json import dumps
from tokasaurus.text.template_text import TemplateText, restored_text
from tokasaurus.text.tokenizer import (
    TEMPLATE_LIMIT_S,
    ChatTemplateError,
    ChatTemplateTooLarge,
    ChatTemplateTooSlow,
    RenderChat,
    Tokenizer,
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    """Text to search in: all of the model's templates, or the one of a request."""
    tools: ToolSupport
    render: RenderChat

    @property
    def marks(self) -> Mapping[str, str]:
        """Start of reasoning → its end; empty for a template without reasoning."""
        return marks_in(self.text)

    def knows(self, variable: str) -> bool:
        """Whether the template mentions a variable with this name."""
        return re.search(rf"\b{re.escape(variable)}\b", self.text) is not None


logger = logging.getLogger(__name__)

# A template that a process cannot end itself, in a single long call, ends with the process.
_KILL_AFTER_S = TEMPLATE_LIMIT_S * 1.5
_START_LIMIT_S = 60.0
_MAX_KNOWN = 64
"""Templates whose tool format is remembered. `chat_rendering` keeps up to 128 compiled ones in each process."""


class RequestTemplates:
    """Thread-safe. A process starts when a template is to be rendered and no other is idle: there are as many as
    threads that render at the same time."""

    def __init__(self, tokenizer: Tokenizer, tool_call_format: str | None = None) -> None:
        """tool_call_format: the flag."""
        self._tokenizer = tokenizer
        self._tool_call_format = tool_call_format
        self._lock = threading.Lock()
        self._known: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._idle: list[_RenderProcess] = []
        self._processes: set[_RenderProcess] = set()

    def find(self, template: str) -> ChatTemplate:
        """template: Jinja, or the name of one of the model's. Renders it, so takes time. Raises ChatTemplateError and
        TemplateRendererFailed."""
        with self._lock:
            if template in self._known:
                self._known.move_to_end(template)
                return self._known[template]
        render = partial(self._render, template)
        found = ChatTemplate(
            self._tokenizer.template_named(template), tool_support_of(render, self._tool_call_format), render
        )
        with self._lock:
            self._known[template] = found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            self._end(process)

    def _render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        """The prompt by a template of the request; other arguments: see Tokenizer.render_chat.

        Raises ChatTemplateError and TemplateRendererFailed."""
        arguments = {
            "template": template,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            "continue_final_message": continue_final_message,
            "template_variables": template_variables,
        }
        try:
            question = dumps(arguments)
        except TypeError:  # all of it comes from JSON
            raise ChatTemplateError("values for a template may be nested about 250 levels deep") from None
        process = self._take()
        try:
            reply = process.ask(question, _KILL_AFTER_S)
        except BaseException:
            self._end(process)
            raise
        text, *rest = orjson.loads(reply)
        kind = rest[0] if text is None else ""
        if kind == ChatTemplateTooLarge.__name__:  # what fills its memory may be compiled templates
            self._end(process)
        else:
            with self._lock:
                self._idle.append(process)
        if text is None:
            raise ERRORS.get(kind, ChatTemplateError)(rest[1])
        return restored_text(text, rest[0])

    def _take(self) -> "_RenderProcess":
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                break
            if process.is_alive:
                return process
            self._end(process)  # killed from outside
        try:
            process = _RenderProcess(str(self._tokenizer.directory.resolve()))
        except OSError as error:
            raise TemplateRendererFailed(f"the process that renders templates cannot start: {error.strerror}") from None
        with self._lock:
            self._processes.add(process)
        try:
            process.wait_until_ready()
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: "_RenderProcess") -> None:
        with self._lock:
            self._processes.discard(process)
            if process in self._idle:
                self._idle.remove(process)
        process.end()


class _RenderProcess:
    """One child process. Raises OSError."""

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tokasaurus.server.templates.render_process", directory, str(_KILL_AFTER_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=PACKAGE_PARENT,
            start_new_session=True,  # so that Ctrl-C reaches the launcher only
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Raises TemplateRendererFailed."""
        line, _ = self._read(_START_LIMIT_S)
        if not line:
            raise TemplateRendererFailed("the process that renders templates does not start")

    def ask(self, question: bytes, limit_s: float) -> bytes:
        """Raises ChatTemplateError if the process dies."""
        try:
            self._questions.write(question + b"\n")
            self._questions.flush()
            line, is_late = self._read(limit_s)
        except BrokenPipeError:
            line, is_late = b"", False
        if line:
            return line
        if is_late:
            reason = f"the chat template does not finish with these messages within {limit_s:g} s"
            raise ChatTemplateTooSlow(reason)
        logger.warning("a process that renders templates died (exit code %s)", self._process.poll())
        raise ChatTemplateError("the chat template crashed the process that renders it")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._questions, self._answers):
            with suppress(OSError):
                pipe.close()

    def _read(self, limit_s: float) -> tuple[bytes, bool]:
        """(the next line, whether the time was over); an empty line if the process died or was killed at its end."""
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            timer.cancel()
        return (line if line.endswith(b"\n") else b""), late.is_set()
