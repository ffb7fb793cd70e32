"""Stop strings with the text of special tokens, against a search of the text of all tokens up to each one."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END, IM_START, save_llama_2_tokenizer, save_small_tokenizer
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.special_stops import find_special_stops
from tokasaurus.text.stop_strings import StopMatcher, StopScanner, StopTokens
from tokasaurus.text.tokenizer import Tokenizer

LLAMA_TOKENS = ["<unk>", "▁a", "b", "▁", "<0x0A>", "<0xC3>", "<0xA9>", "<0x3C>", "</s", ">"]
END = len(LLAMA_TOKENS)
KINDS: dict[str, list[list[int]]] = {
    "byte-level": [[id_] for id_ in (97, 98, 10, *"é".encode(), *b"<|im_end|>", IM_START, IM_END)],
    # its bytes are no characters of their own beside one that is incomplete
    "llama": [*([id_] for id_ in (1, 2, 3, 4, 7, 8, 9, END, END)), [5, 6]],
}
STOPS = {
    "byte-level": ["<|im_end|>", "\n<|im_end|>", "a<|im_start|>b", "<|im_start|><|im_end|>", "ab", "é<|im_end|>", "b"],
    "llama": ["</s>", "\n</s>", "a</s> a", "</s></s>", "b a", " </s>", "é</s>", "</s>b"],
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    small = save_small_tokenizer(tmp_path_factory.mktemp("small"))
    llama = save_llama_2_tokenizer(tmp_path_factory.mktemp("llama"), LLAMA_TOKENS)
    return {"byte-level": Tokenizer.load(Path(small)), "llama": Tokenizer.load(Path(llama))}


def token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(KINDS[kind]), max_size=16).map(
        lambda parts: [id_ for part in parts for id_ in part]
    )


def completed(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether the text of all ids, with each special token as the text of an own character, has a stop string."""
    special = find_special_stops(tokenizer, stops)
    marks = {} if special is None else special.marks
    text, run = "", list[int]()
    before = list[int]()
    for id_ in [*ids, None]:
        if id_ is None or id_ in marks:
            start = "" if tokenizer.is_byte_level else tokenizer.decode(before)
            text += tokenizer.decode([*([] if tokenizer.is_byte_level else before), *run])[len(start) :]
            text += "" if id_ is None else marks[id_]
            before, run = [*before, *run], []
        else:
            run.append(id_)
    return any(stop in text for stop in (stops if special is None else special.stops))


@pytest.mark.parametrize("kind", KINDS)
@examples(600)
@given(st.data())
def test_the_token_that_completes_a_stop_is_found_by_looking_back(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(token_ids(kind))
    stops = data.draw(st.lists(st.sampled_from(STOPS[kind]), min_size=1, max_size=3, unique=True))
    wanted = next((end for end in range(1, len(ids) + 1) if completed(tokenizer, ids[:end], stops)), None)
    special = find_special_stops(tokenizer, stops)
    if special is None:
        matcher = StopMatcher(tokenizer.decode, stops, tokenizer.special_ids)
    else:
        matcher = StopMatcher(special.decode, special.stops, tokenizer.special_ids - special.marks.keys())
    assert matcher.first_completion(ids, 0) == wanted
    for end in range(1, (len(ids) if wanted is None else wanted) + 1):
        assert matcher.first_completion(ids[:end], end - 1) == (wanted if end == wanted else None)
    if wanted is not None:
        texts = [tokenizer.decode([id_]) for id_ in range(tokenizer.vocab_size)]
        rows = StopTokens(texts)
        row = rows.row(*(stops, ()) if special is None else (special.stops, special.marks))
        assert rows.may_end[row, ids[wanted - 1]]


@pytest.mark.parametrize("kind", KINDS)
@examples(400)
@given(st.data())
def test_text_that_arrives_in_parts_is_the_text_of_all_tokens(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(token_ids(kind))
    prompt = data.draw(token_ids(kind))[:4]
    special = find_special_stops(tokenizer, STOPS[kind])
    assert special is not None
    tail = tokenizer.prompt_tail(prompt)
    detokenizer = make_detokenizer(tokenizer, tail, special)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    parts = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    text = "".join([*(detokenizer.add(part) for part in parts[:-1]), detokenizer.finish(parts[-1])])
    assert text == tail.text_after(special.decode, ids)


def test_a_stop_is_named_as_it_was_given(tokenizers: dict[str, Tokenizer]) -> None:
    special = find_special_stops(tokenizers["byte-level"], ["x\n<|im_end|>", "y"])
    assert special is not None
    for ids in ([97, 120, 10, IM_END, 98], [97, 120, IM_START, 10, IM_END], [97, 120, 10, *b"<|im_end|>"]):
        scanner = StopScanner(special.stops)
        text, has_stopped = scanner.add(special.decode(ids), 0, False)
        assert (special.shown(text), has_stopped, special.as_given(scanner.found)) == ("a", True, "x\n<|im_end|>")


def test_stops_without_special_tokens_change_nothing(tokenizers: dict[str, Tokenizer]) -> None:
    for stops in (["<|im_"], ["im_end"], ["|>"], ["a"], [], ["</s>"]):
        assert find_special_stops(tokenizers["byte-level"], stops) is None
    assert find_special_stops(tokenizers["byte-level"], ["<|im_end|>"], [IM_START]) is None
