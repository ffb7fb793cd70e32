import codecs
import random

import pytest

from tests.helpers.small_tokenizer import IM_END, VOCAB_SIZE
from tokasaurus.server.respond.logprobs import TokenOffsets
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer


def token_offsets(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    offsets = TokenOffsets(tokenizer)
    return [offsets.next(token_id) for token_id in token_ids]


def bytes_before(token_ids: list[int], model: ServedModel) -> list[bytes]:
    """The bytes of the text in front of each token."""
    special_ids = model.tokenizer.special_ids
    pieces = [b"" if token_id in special_ids else model.tokenizer.token_bytes(token_id) for token_id in token_ids]
    return [b"".join(pieces[:position]) for position in range(len(pieces))]


@pytest.mark.parametrize("seed", range(30))
def test_offset_is_the_number_of_whole_characters_before_a_token(served_model: ServedModel, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("aé€😀hello w") for _ in range(12))
    ids = served_model.tokenizer.encode(text, add_special_tokens=False)
    ids.insert(rng.randrange(len(ids)), IM_END)
    expected = [len(before.decode(errors="ignore")) for before in bytes_before(ids, served_model)]
    assert token_offsets(ids, served_model.tokenizer) == expected


@pytest.mark.parametrize("seed", range(30))
def test_offsets_fit_the_decoded_text_even_of_broken_utf8(served_model: ServedModel, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.choice([rng.randrange(VOCAB_SIZE), *"€😀".encode()]) for _ in range(20)]
    text = served_model.tokenizer.decode(ids)
    offsets = token_offsets(ids, served_model.tokenizer)
    for offset, before in zip(offsets, bytes_before(ids, served_model), strict=True):
        settled, _ = codecs.utf_8_decode(before, "replace", False)
        assert offset == len(settled)
        assert text.startswith(settled)
