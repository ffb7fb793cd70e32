"""Token ids → text, with `tokenizers` alone: all of the text that the manager needs."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as BaseTokenizer

from tokasaurus.messages.status import UserError, one_line
from tokasaurus.text.prompt_tail import PromptTail, tail_of_bytes, tail_of_tokens
from tokasaurus.text.token_bytes import TokenBytes

# Some models declare these as special tokens, but the tool-call parser needs them in the text.
CALL_MARKS = ("<tool_call>", "</tool_call>")


class TokenizerError(UserError):
    """The tokenizer's files are missing or broken. The message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class TokenDecoder:
    """Decodes token ids to text, for the manager, which needs nothing else. Thread-safe."""

    def __init__(self, base: BaseTokenizer) -> None:
        self._base = base
        self._bytes = TokenBytes(base)
        self.is_byte_level = self._bytes.is_byte_level
        """The text is the concatenation of the tokens' bytes, decoded as UTF-8. Other decoders may, for instance, drop
        the first space."""
        special = {id_: token.content for id_, token in base.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(id_ for id_, content in special.items() if content not in CALL_MARKS)
        # The library would skip CALL_MARKS as well if they are special.
        self._skips_special_itself = len(self.special_ids) < len(special)

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
            return tail_of_bytes(prompt_ids, self.special_ids, self._bytes)
        return tail_of_tokens(prompt_ids, self.special_ids, self._bytes, self.decode)

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
