"""Token ids ↔ text, and chat messages → prompt.

`tokenizers` alone encodes and decodes; transformers renders chat templates in its sandbox. Neither imports torch.
"""

import inspect
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as BaseTokenizer

from tokasaurus.messages.lifecycle import UserError
from tokasaurus.text.special_text import SpecialText
from tokasaurus.text.token_bounds import TokenBounds
from tokasaurus.text.token_bytes import BYTE_OF_CHARACTER, TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Some models mark these as special, as if they were no text; but calls of tools are read from the text.
_CALL_MARKS = ("<tool_call>", "</tool_call>")


class TokenizerError(UserError):
    """The tokenizer's files are missing or broken. The message is one line for the user."""


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages; the message says why."""


class TemplateVariableError(ChatTemplateError):
    """The name of a template variable is one of the renderer's own."""


class TextTooLong(ValueError):
    """A text has more tokens than are allowed, by its length alone. fewest_tokens: it has at least so many."""

    def __init__(self, fewest_tokens: int) -> None:
        super().__init__(f"at least {fewest_tokens} tokens")
        self.fewest_tokens = fewest_tokens


class TokenDecoder:
    """Ids to text and nothing else: what the manager needs. Safe to use from several threads."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        special = {id_: token.content for id_, token in base.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(id_ for id_, content in special.items() if content not in _CALL_MARKS)
        self._leaves_out_itself = len(self.special_ids) < len(special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text as it is: no clean-up of spaces; incomplete UTF-8 becomes U+FFFD; ids without a token vanish.

        skip_special_tokens: leave out `special_ids`."""
        if skip_special_tokens and self._leaves_out_itself:
            ids = [id_ for id_ in ids if id_ not in self.special_ids]
            skip_special_tokens = False
        return self._base.decode(ids, skip_special_tokens=skip_special_tokens)


class Tokenizer(TokenDecoder):
    """A model's tokenizer as the server uses it. Safe to use from several threads.

    directory: where tokenizer.json is.
    vocab_size: one more than the highest token id; the model's own may be higher, for padding.
    special_ids: tokens that `decode` leaves out. bos_token, eos_token: as tokenizer_config.json names them.
    is_byte_level: the text is the UTF-8 of the tokens' bytes, one after the other; other decoders may, for instance,
    drop the first space.
    """

    def __init__(self, base: BaseTokenizer, directory: Path) -> None:
        super().__init__(base)
        # Settings of a training run, which a file may hold, would cut prompts short.
        base.no_truncation()
        base.no_padding()
        self.vocab_size = max(base.get_vocab(with_added_tokens=True).values()) + 1
        self._bytes = TokenBytes(base)
        self.is_byte_level = self._bytes.is_byte_level
        self._bounds = TokenBounds(base, BYTE_OF_CHARACTER)
        self._special_text = SpecialText(base)
        self.directory = directory
        self._chat_tokenizer: PreTrainedTokenizerFast | None = None
        self._chat_tokenizer_lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json; chat template and named tokens are read on first use. Raises TokenizerError."""
        return cls(_load_base(directory), directory)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """add_special_tokens: what tokenizer.json adds around a text, such as bos. Special tokens in `text` count."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """As `encode` for each, on several cores, and other threads run meanwhile.

        max_tokens: raises TextTooLong at once for a text that must have more; one that has more need not raise.
        """
        self._check_lengths(texts, max_tokens)
        # The library's `encode` of a single text would keep the GIL, and so stop the server's event loop.
        encoded = self._base.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(one.ids) for one in encoded]

    def token_starts(self, text: str, add_special_tokens: bool) -> list[int]:
        """Where each token of `encode` begins in `text`, in characters; one that is not in it, where the next one does.

        As near as the tokenizer knows: some leave out white space at the beginning of a token.
        """
        (encoded,) = self._base.encode_batch([text], add_special_tokens=add_special_tokens)
        starts, start_behind = [], len(text)
        for start, end in reversed(encoded.offsets):
            start_behind = start if start < end else start_behind
            starts.append(start_behind)
        return starts[::-1]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included.

        template_variables: further names for the template, such as enable_thinking. Raises ChatTemplateError.
        """
        return self._render(messages, tools, template_variables or {}, add_generation_prompt, continue_final_message)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The rendered prompt's ids. A template writes bos itself, so none is added. Raises ChatTemplateError.

        Special tokens are those of the template: their text in messages, tools and variables stays text.
        max_tokens: raises TextTooLong at once for a prompt that must have more; one that has more need not raise.
        """
        try:
            (given, given_tools, variables), mark = self._special_text.mark(
                list(messages), tools, template_variables or {}
            )
        except RecursionError:
            raise ChatTemplateError("messages or variables are nested too deeply") from None
        text = self._render(given, given_tools, variables, add_generation_prompt, continue_final_message)
        if not mark:
            return self.encode_batch([text], add_special_tokens=False, max_tokens=max_tokens)[0]
        self._check_lengths([text.replace(mark, "")], max_tokens)
        return self._special_text.encode(text, mark)

    def _check_lengths(self, texts: Iterable[str], max_tokens: int | None) -> None:
        if max_tokens is not None:
            for text in texts:
                # no token is empty: most texts are told by their length
                if len(text) > max_tokens and (fewest := self._bounds.fewest_tokens(text)) > max_tokens:
                    raise TextTooLong(fewest)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        from jinja2 import TemplateError

        chat_tokenizer = self._load_chat_tokenizer()
        if not chat_tokenizer.chat_template:
            raise ChatTemplateError("this model has no chat template; use completions")
        _check_variables(variables, inspect.signature(chat_tokenizer.apply_chat_template).parameters)
        try:
            return str(
                chat_tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **variables,
                )
            )
        # A template is a program: content that it does not expect may raise any of these.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except RecursionError:
            raise ChatTemplateError("messages or variables are nested too deeply") from None

    @property
    def bos_token(self) -> str | None:
        token: str | None = self._load_chat_tokenizer().bos_token
        return token

    @property
    def eos_token(self) -> str | None:
        token: str | None = self._load_chat_tokenizer().eos_token
        return token

    @property
    def chat_template(self) -> str | None:
        """The template that is used, where the model has several by name the one called default."""
        loaded = self._load_chat_tokenizer()
        template: str | None = loaded.get_chat_template() if loaded.chat_template else None
        return template

    @property
    def added_tokens(self) -> dict[str, int]:
        """Texts that are always a token of their own, special ones left out → the token's id."""
        return {text: id_ for id_, text in self._bytes.added_texts.items() if id_ not in self.special_ids}

    @property
    def named_tokens(self) -> dict[str, str]:
        """As tokenizer_config.json names them: eos_token, bos_token, pad_token, ... → text."""
        names: dict[str, str] = self._load_chat_tokenizer().special_tokens_map
        return {name: text for name, text in names.items() if isinstance(text, str)}

    def vocabulary_entry(self, token_id: int) -> str:
        """As tokenizer.json spells it, such as "Ġworld"; empty for an id without a token."""
        return self._base.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; empty for an id without a token. Special tokens give their name.

        Exact for byte-level BPE; otherwise "▁" is a space and "<0xNN>" a byte, as SentencePiece vocabularies have it.
        """
        return self._bytes.of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; a part of a character becomes U+FFFD."""
        return self._bytes.text_of(token_id)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether it is one of SentencePiece's "<0xNN>", of which a decoder reads a whole run at once."""
        return self._bytes.is_byte_token(token_id)

    def _load_chat_tokenizer(self) -> "PreTrainedTokenizerFast":
        with self._chat_tokenizer_lock:
            if self._chat_tokenizer is None:
                from transformers import PreTrainedTokenizerFast

                try:
                    loaded = PreTrainedTokenizerFast.from_pretrained(self.directory, local_files_only=True)
                except Exception as error:  # whatever a broken file makes it raise
                    raise TokenizerError(f"cannot read the tokenizer in {self.directory}: {error}") from error
                self._chat_tokenizer = loaded
            return self._chat_tokenizer


def load_token_decoder(directory: Path) -> TokenDecoder:
    """For a process that turns ids to text only: loads no transformers. Raises TokenizerError."""
    return TokenDecoder(_load_base(directory))


def _check_variables(variables: Iterable[str], parameters: Container[str]) -> None:
    """Variables come from the client: none may be a parameter of the renderer, least of all a template of its own."""
    for name in variables:
        if name in parameters:
            raise TemplateVariableError(f"{name} is not a variable of a chat template")


def _load_base(directory: Path) -> BaseTokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{directory} has no tokenizer.json")
    try:
        return BaseTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"cannot read {path}: {error}") from None
