"""Text offsets of completion tokens, compared with decoding the bytes before each token."""

import codecs
import random

import pytest

from tests.helpers.examples import seeds
from tests.helpers.small_tokenizer import IM_END, VOCAB_SIZE
from tokasaurus.server.respond.logprobs import TokenOffsets
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer


def token_offsets(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    offsets = TokenOffsets(tokenizer)
    return [offsets.next(token_id)[0] for token_id in token_ids]


def bytes_before(token_ids: list[int], model: ServedModel) -> list[bytes]:
    """Bytes of the text before each token; special tokens have none."""
    special_ids = model.tokenizer.special_ids
    bytes_of_tokens = [
        b"" if token_id in special_ids else model.tokenizer.token_bytes(token_id) for token_id in token_ids
    ]
    return [b"".join(bytes_of_tokens[:position]) for position in range(len(bytes_of_tokens))]


@pytest.mark.parametrize("seed", seeds(30))
def test_offset_is_the_number_of_complete_characters_before_the_token(served_model: ServedModel, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("aé€😀hello w") for _ in range(12))
    ids = served_model.tokenizer.encode(text, add_special_tokens=False)
    ids.insert(rng.randrange(len(ids)), IM_END)
    expected = [len(before.decode(errors="ignore")) for before in bytes_before(ids, served_model)]
    assert token_offsets(ids, served_model.tokenizer) == expected


@pytest.mark.parametrize("seed", seeds(30))
def test_offsets_match_the_decoded_text_even_for_broken_utf8(served_model: ServedModel, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.choice([rng.randrange(VOCAB_SIZE), *"€😀".encode()]) for _ in range(20)]
    text = served_model.tokenizer.decode(ids)
    offsets = token_offsets(ids, served_model.tokenizer)
    for offset, before in zip(offsets, bytes_before(ids, served_model), strict=True):
        settled, _ = codecs.utf_8_decode(before, "replace", False)
        assert offset == len(settled)
        assert text.startswith(settled)
