"""Token ids ↔ text, and chat messages → prompt.

`tokenizers` encodes and decodes, Jinja renders chat templates in a sandbox. Neither imports transformers or torch.
"""

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as BaseTokenizer

from tokasaurus.text.chat_files import RESERVED_NAMES, ChatFiles, read_chat_files
from tokasaurus.text.special_text import SpecialText, strings_in
from tokasaurus.text.template_text import TemplateText
from tokasaurus.text.time_limit import TimeLimit, TimeLimitExceeded
from tokasaurus.text.token_bytes import TokenBounds
from tokasaurus.text.token_decoder import TokenDecoder, TokenizerError, load_base

TEMPLATE_LIMIT_S = 10.0
"""A template is a program from the model's repository, which may loop. Ordinary ones take below a millisecond, long
chats some ten; the limit is generous because all threads may be busy."""
_RENDERING = TimeLimit(TEMPLATE_LIMIT_S)


# Shorter strings are left out of the early bound on tokens: they would cost more time than they add.
_SHORT_CHARS = 64


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template rejects the messages; the error message states the reason."""


class ChatTemplateTooSlow(ChatTemplateError):
    """The template did not finish within TEMPLATE_LIMIT_S."""


class ChatTemplateTooLarge(ChatTemplateError):
    """The template needs more memory than there is."""


class InvalidChatTemplate(ChatTemplateError):
    """The template is no valid program; the error message states the line."""


class TemplateVariableError(ChatTemplateError):
    """A template variable has the name of one of the renderer's own parameters."""


class RenderChat(Protocol):
    """`Tokenizer.render_chat`, or another function that does the same with another template."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> TemplateText: ...


class TextTooLong(ValueError):
    """A text is so long that it must have more tokens than allowed. fewest_tokens: lower bound on its tokens."""

    def __init__(self, fewest_tokens: int) -> None:
        super().__init__(f"at least {fewest_tokens} tokens")
        self.fewest_tokens = fewest_tokens


class Tokenizer(TokenDecoder):
    """A model's tokenizer as the server uses it. Thread-safe. `decode` omits the tokens in `special_ids`."""

    def __init__(self, base: BaseTokenizer, directory: Path) -> None:
        super().__init__(base)
        # The file may contain truncation settings from training, which would shorten prompts.
        base.no_truncation()
        base.no_padding()
        self.vocab_size = max(base.get_vocab(with_added_tokens=True).values()) + 1
        """Highest token id + 1. The model's vocabulary may be larger, for padding."""
        self._bounds = TokenBounds(base)
        self._special_text = SpecialText(base)
        self.directory = directory
        """Contains tokenizer.json."""
        self._chat_files: ChatFiles | None = None
        self._chat_files_lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json; the chat template and named tokens are read on first use. Raises TokenizerError."""
        return cls(load_base(directory), directory)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, in which the text of a special token becomes this token.

        add_special_tokens: add the tokens that tokenizer.json puts around a text, such as bos.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """`encode` for each text, on several cores and without holding the GIL.

        max_tokens: a text whose length alone implies more tokens raises TextTooLong before anything is encoded. Other
        texts may still have more tokens, which does not raise.
        """
        self._check_lengths(texts, max_tokens)
        # The library's `encode` of a single text holds the GIL, which would block the server's event loop.
        encoded = self._base.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(one.ids) for one in encoded]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Two texts together, with the tokens that tokenizer.json puts around and between them."""
        return [list(one.ids) for one in self._base.encode_batch_fast(list(pairs), add_special_tokens=True)]

    def with_added_tokens(self, ids: Sequence[int]) -> list[int]:
        """The ids, with the tokens that tokenizer.json puts around a text."""
        return [*self._added_around[0], *ids, *self._added_around[1]]

    @functools.cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        """The ids before and after a text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a", add_special_tokens=True)
        starts = range(len(whole) - len(plain) + 1)
        start = next(start for start in starts if whole[start : start + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    def token_starts(self, text: str, add_special_tokens: bool) -> list[int]:
        """Start of each token of `encode` in `text`, in characters; for a token not in the text, the next one's start.

        Only as precise as the tokenizer: some exclude white space at the beginning of a token.
        """
        (encoded,) = self._base.encode_batch([text], add_special_tokens=add_special_tokens)
        starts, next_start = [], len(text)
        for start, end in reversed(encoded.offsets):
            next_start = start if start < end else next_start
            starts.append(next_start)
        return starts[::-1]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> TemplateText:
        """The prompt's text, including special tokens.

        template_variables: additional variables for the template, such as enable_thinking. template: in place of the
        model's own, or the name of one of these. Raises ChatTemplateError.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        from tokasaurus.text.chat_rendering import render

        variables = template_variables or {}
        files = self._read_chat_files()
        if not files.templates and template is None:
            raise ChatTemplateError("this model has no chat template; use completions")
        _check_variables(variables)
        try:
            chosen = files.choose(tools) if template is None else files.named(template)
            return _RENDERING.run(
                lambda: render(
                    chosen,
                    messages,
                    tools,
                    add_generation_prompt,
                    continue_final_message,
                    variables,
                    self.named_tokens,
                )
            )
        except TimeLimitExceeded:
            reason = f"the chat template does not finish with these messages within {_RENDERING.seconds:g} s"
            raise ChatTemplateTooSlow(reason) from None
        except TemplateSyntaxError as error:
            raise InvalidChatTemplate(f"not a valid template: {error.message} (line {error.lineno})") from error
        # A template is a program: unexpected content may raise any of these.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except MemoryError:
            raise ChatTemplateTooLarge("the chat template needs too much memory with these messages") from None
        except RecursionError:
            raise ChatTemplateError("messages or variables are nested too deeply") from None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        render: RenderChat | None = None,
    ) -> list[int]:
        """Token ids of the rendered prompt. The template writes bos itself, so none is added.

        A special token becomes one only if the template itself writes it. The same text with a character of messages,
        tools or variables is encoded as ordinary text. max_tokens: as in `encode_batch`. render: in place of
        `render_chat`. Raises ChatTemplateError and TextTooLong.
        """
        if max_tokens is not None:
            # Before any work on the texts. A template may leave out some of them, such as earlier reasoning.
            fewest = self._fewest_tokens_of_all([list(messages), tools, template_variables], 4 * max_tokens)
            if fewest > 4 * max_tokens:
                raise TextTooLong(fewest)
        text = (render or self.render_chat)(
            messages, add_generation_prompt, tools, continue_final_message, template_variables
        )
        self._check_lengths([text], max_tokens)
        return self._special_text.encode(text)

    def _fewest_tokens_of_all(self, values: object, num_allowed: int) -> int:
        """A lower bound on the tokens of all strings in JSON values; 0 where few characters make the bound needless."""
        texts = list(strings_in(values))
        if sum(map(len, texts)) <= num_allowed:
            return 0
        return sum(self._bounds.fewest_tokens(text) for text in texts if len(text) >= _SHORT_CHARS)

    def _check_lengths(self, texts: Iterable[str], max_tokens: int | None) -> None:
        if max_tokens is not None:
            for text in texts:
                # No token is empty, so the number of characters decides for most texts.
                if len(text) > max_tokens and (fewest := self._bounds.fewest_tokens(text)) > max_tokens:
                    raise TextTooLong(fewest)

    @property
    def bos_token(self) -> str | None:
        """The bos token of tokenizer_config.json."""
        return self.named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The eos token of tokenizer_config.json."""
        return self.named_tokens.get("eos_token")

    @property
    def chat_template(self) -> str | None:
        """The chat template in use; if the model has several named templates, the one named "default", if any."""
        return self._read_chat_files().default

    @functools.cached_property
    def template_text(self) -> str:
        """All of the model's chat templates, as text to search in; empty if it has none."""
        return "\n".join(self._read_chat_files().templates.values())

    def template_named(self, name: str) -> str:
        """The model's template with this name; `name` itself, which then is a template, if there is none."""
        return self._read_chat_files().named(name)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text → id of the added tokens, whose text always becomes this one token; without special tokens."""
        return {text: id_ for id_, text in self._bytes.added_texts.items() if id_ not in self.special_ids}

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Name in tokenizer_config.json (eos_token, bos_token, pad_token, …) → the token's text."""
        return self._read_chat_files().named_tokens

    def vocabulary_entry(self, token_id: int) -> str:
        """The token as tokenizer.json spells it, such as "Ġworld"; empty for an id without a token."""
        # The library raises for ids beyond 32 bits.
        return (self._base.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """The bytes this token adds to the text; empty for an id without a token. Special tokens yield their name.

        A byte token "<0xNN>" is that byte. is_first: no token with text precedes it; a SentencePiece decoder then drops
        its leading space.
        """
        return self._bytes.of(token_id, is_first)

    def token_text(self, token_id: int, is_first: bool = False) -> str:
        """`token_bytes` as text; an incomplete character becomes U+FFFD."""
        return self._bytes.text_of(token_id, is_first)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether this is a SentencePiece byte token "<0xNN>"; decoders decode a run of these as a unit."""
        return self._bytes.is_byte_token(token_id)

    def _read_chat_files(self) -> ChatFiles:
        with self._chat_files_lock:
            if self._chat_files is None:
                try:
                    self._chat_files = read_chat_files(self.directory)
                except (OSError, ValueError, TypeError, LookupError) as error:
                    raise TokenizerError(f"cannot read the tokenizer in {self.directory}: {error}") from error
            return self._chat_files


def _check_variables(variables: Iterable[str]) -> None:
    """Reject variables named like a parameter of the renderer: clients could otherwise replace the template itself."""
    for name in variables:
        if name in RESERVED_NAMES:
            raise TemplateVariableError(f"{name} is not a variable of a chat template")
