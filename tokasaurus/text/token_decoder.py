"""Token ids → text, with `tokenizers` alone: all of the text that the manager needs.

A completion's text is what decoding adds when its ids follow the prompt's, so it depends on the end of the prompt: the
first "▁world" keeps its space, and bytes that complete the prompt's last character give this character.
"""

import codecs
import copy
import functools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as BaseTokenizer

from tokasaurus.messages.status import UserError, one_line
from tokasaurus.text.special_text import any_of
from tokasaurus.text.token_bytes import TokenBytes

Decoder = TypeVar("Decoder", bound="TokenDecoder")

REASONING_MARKS: Mapping[str, str] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Start of reasoning → its end."""

CALL_MARKS = frozenset(
    (
        *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<TOOLCALL>", "</TOOLCALL>"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        *("<|tools_prefix|>", "<|tools_suffix|>", "<function_calls>", "</function_calls>"),
        *("<start_function_call>", "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    )
)
"""Texts that are single tokens of some models and begin, part or end tool calls."""

SHOWN_MARKS = frozenset((*CALL_MARKS, *REASONING_MARKS, *REASONING_MARKS.values()))
"""Some models declare these as special tokens, but the readers of calls and of reasoning need them in the text."""

PROMPT_TAIL_TOKENS = 64
"""Most tokens that are read at the end of a prompt."""

_MAX_BYTE_TOKENS = 32
"""Most byte tokens that are read at the end of a prompt. A longer run is taken for valid UTF-8 before them."""

_MAX_OPEN_BYTES = 3  # of an incomplete character
_CONTINUATION = range(0x80, 0xC0)


class TokenizerError(UserError):
    """The tokenizer's files are missing or broken. The message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True, slots=True)
class PromptTail:
    """The last tokens of a prompt; no tokens if they do not change the text of what follows."""

    token_ids: tuple[int, ...] = ()
    num_characters: int = 0
    """Characters of their decoding that the prompt's text has. The rest is an incomplete character, which belongs to
    the completion's text, where it may be completed."""
    num_open_tokens: int = 0
    """Byte tokens at the end that are this character; 0 for byte-level BPE, whose tokens may end inside one."""

    def text_after(self, decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> str:
        """The text that these ids add to the prompt. decode: without special tokens."""
        return decode([*self.token_ids, *token_ids])[self.num_characters :] if self.token_ids else decode(token_ids)


NO_TAIL = PromptTail()


class TokenDecoder:
    """Decodes token ids to text, for the manager, which needs nothing else. Thread-safe."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        self._bytes = TokenBytes(base)
        self.is_byte_level = self._bytes.is_byte_level
        """The text is the concatenation of the tokens' bytes, decoded as UTF-8. Other decoders may, for instance, drop
        the first space."""
        special = {id_: token.content for id_, token in base.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(id_ for id_, content in special.items() if content not in SHOWN_MARKS)
        self.special_texts = {special[id_]: id_ for id_ in self.special_ids if special[id_]}
        """Text → id of these tokens."""
        # The library would skip SHOWN_MARKS as well if they are special.
        self._skips_special_itself = len(self.special_ids) < len(special)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds the longest text of a special token at each place. Precondition: there are special tokens."""
        return re.compile(any_of(self.special_texts))

    def has_text(self, token_id: int) -> bool:
        """Whether the token adds anything to the text."""
        return self._bytes.of(token_id) != b""

    def with_special(self: Decoder) -> Decoder:
        """The same tokens, with special tokens as part of the text: its `special_ids` are empty."""
        shown = copy.copy(self)
        shown.special_ids = frozenset()
        shown._skips_special_itself = True
        return shown

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The exact text, with no clean-up of spaces. Incomplete UTF-8 becomes U+FFFD; ids without a token are dropped.

        An added token has its own text, also if this could be read as letters of the byte-level alphabet ("café").
        skip_special_tokens: omit the tokens in `special_ids`."""
        if self._bytes.misread_ids and not self._bytes.misread_ids.isdisjoint(ids):
            shown = [id_ for id_ in ids if id_ not in self.special_ids] if skip_special_tokens else ids
            return b"".join(map(self._bytes.of, shown)).decode(errors="replace")
        if skip_special_tokens and self._skips_special_itself:
            ids = [id_ for id_ in ids if id_ not in self.special_ids]
            skip_special_tokens = False
        return self._base.decode(ids, skip_special_tokens=skip_special_tokens)

    def prompt_tail(self, prompt_ids: Sequence[int]) -> PromptTail:
        """What `decode_after` needs of a prompt, to decode its completions. Reads only the last PROMPT_TAIL_TOKENS."""
        if self.is_byte_level:
            return _tail_of_bytes(prompt_ids, self.special_ids, self._bytes)
        return _tail_of_tokens(prompt_ids, self.special_ids, self._bytes, self.decode)

    def decode_after(self, tail: PromptTail, ids: Sequence[int]) -> str:
        """The text that `ids` add to the prompt with this tail; special tokens are omitted."""
        return tail.text_after(self.decode, ids)


def load_token_decoder(directory: Path) -> TokenDecoder:
    """For a process that only decodes: does not load transformers. Raises TokenizerError."""
    return TokenDecoder(load_base(directory))


def load_base(directory: Path) -> BaseTokenizer:
    """Read tokenizer.json and split_special_tokens of tokenizer_config.json. Raises TokenizerError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{directory} has no tokenizer.json")
    try:
        base = BaseTokenizer.from_file(str(path))
        config_path = directory / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        # The one setting of AutoTokenizer that tokenizer.json cannot hold.
        base.encode_special_tokens = bool(config.get("split_special_tokens", False))
        return base
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"cannot read {path}: {error}") from None


def _tail_of_bytes(prompt_ids: Sequence[int], special_ids: Container[int], token_bytes: TokenBytes) -> PromptTail:
    """The prompt's tail for byte-level BPE: only an incomplete last character matters. Special tokens have no text."""
    token_ids: list[int] = []
    last_bytes = b""
    for token_id in reversed(prompt_ids[-PROMPT_TAIL_TOKENS:]):
        own = b"" if token_id in special_ids else token_bytes.of(token_id)
        if own:
            token_ids.append(token_id)
            last_bytes = own + last_bytes
            if len(last_bytes) >= _MAX_OPEN_BYTES or last_bytes[0] not in _CONTINUATION:
                break
    text, num_decoded = codecs.utf_8_decode(last_bytes, "replace", False)
    return NO_TAIL if num_decoded == len(last_bytes) else PromptTail(tuple(reversed(token_ids)), len(text))


def _tail_of_tokens(
    prompt_ids: Sequence[int],
    special_ids: Container[int],
    token_bytes: TokenBytes,
    decode: Callable[[Sequence[int]], str],
) -> PromptTail:
    """For any other decoder: the last token with text, and the byte tokens after it, which are decoded as a unit."""
    last_first: list[int] = []
    run: list[int] = []
    for token_id in reversed(prompt_ids[-PROMPT_TAIL_TOKENS:]):
        if token_id in special_ids or not token_bytes.of(token_id):
            continue
        last_first.append(token_id)
        if len(last_first) > _MAX_BYTE_TOKENS or not token_bytes.is_byte_token(token_id):
            break
        run.append(token_id)
    if len(run) == _MAX_BYTE_TOKENS:
        last_first = run
        while len(last_first) > 1 and token_bytes.of(last_first[-1])[0] in _CONTINUATION:
            last_first.pop()  # the run is cut where a character begins
        run = last_first
    token_ids = tuple(reversed(last_first))
    num_open = _num_open(b"".join(map(token_bytes.of, reversed(run))))
    return PromptTail(token_ids, len(decode(token_ids[: len(token_ids) - num_open])), num_open)


def _num_open(run: bytes) -> int:
    """Number of last bytes that begin a character; 0 if the bytes before them are no valid UTF-8."""
    try:
        return len(run) - codecs.utf_8_decode(run, "strict", False)[1]
    except UnicodeDecodeError:
        return 0
