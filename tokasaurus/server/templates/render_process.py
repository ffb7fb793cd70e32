"""Child process of the server that renders the chat templates of requests.

Such a template is a program of a client: it may loop, fill the memory, or keep the interpreter busy in a single call.
In a child process this harms no other request.
Run as `python -m tokasaurus.server.templates.render_process DIRECTORY LIMIT_S`; DIRECTORY contains the tokenizer.
Questions arrive on stdin and answers leave on stdout, each as a line of JSON. The first line on stdout says that the
process is ready.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tokasaurus.server.child_process import answer_lines, die_with_server
from tokasaurus.text.exact_json import loads
from tokasaurus.text.template_text import plain, written_spans
from tokasaurus.text.tokenizer import (
    ChatTemplateError,
    ChatTemplateTooLarge,
    ChatTemplateTooSlow,
    InvalidChatTemplate,
    TemplateVariableError,
    Tokenizer,
)

# Address space that templates may use on top of what the process uses when it is ready.
_MEMORY_BYTES = 2**30
MAX_RENDERED_CHARS = 2**26
_MAX_ERROR_CHARS = 1000
# Errors that the server tells apart; others are ChatTemplateErrors.
ERRORS = {
    error.__name__: error
    for error in (ChatTemplateTooLarge, ChatTemplateTooSlow, InvalidChatTemplate, TemplateVariableError)
}


def answer(tokenizer: Tokenizer, question: bytes) -> bytes:
    """question: JSON object of the arguments of `render_chat`. Returns JSON [text, spans that the template wrote] or
    [null, kind, reason]."""
    arguments: dict[str, Any] = loads(question)
    try:
        text = tokenizer.render_chat(**arguments)
        if len(text) > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"the chat template writes more than {MAX_RENDERED_CHARS} characters")
        return orjson.dumps([plain(text), written_spans(text)])
    except ChatTemplateError as error:
        return _refusal(type(error).__name__, str(error))
    except MemoryError:
        return _refusal(ChatTemplateTooLarge.__name__, "the chat template writes too long a text")
    except Exception as error:  # of the template's compilation, or a text that is no Unicode
        return _refusal("", f"the chat template cannot be used: {error}")


def _refusal(kind: str, reason: str) -> bytes:
    written = reason[:_MAX_ERROR_CHARS].encode(errors="replace").decode()
    return orjson.dumps([None, kind if kind in ERRORS else "", written])


def main(directory: str, limit_s: str) -> None:
    tokenizer = Tokenizer.load(Path(directory))
    tokenizer.render_chat([{"role": "user", "content": ""}], template="")  # loads all that rendering needs
    answer_lines(partial(answer, tokenizer), _MEMORY_BYTES, float(limit_s))


if __name__ == "__main__":
    die_with_server("toka-template")
    main(*sys.argv[1:])
