"""The manager and the worker together, in one process: greedy texts under grammars against transformers."""

import dataclasses
import random
import re
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher
from transformers import PreTrainedModel

from tests.end_to_end.helpers.runner_worker import Worker
from tests.helpers.tiny_model import EOS_ID, VOCAB_SIZE, save_tiny_model
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner, one_thread
from tokasaurus.text.grammars import GrammarVocabulary, load_grammar_vocabulary, make_matcher
from tokasaurus.text.token_decoder import load_token_decoder

MAX_NEW_TOKENS = 24
PATTERNS = [r"[a-z]{2,5}@[a-z]+\.(com|org)", r'\{"x": (true|false|[0-9]{1,3})\}', r"(yes|no|never)", r"[^q]*"]


def greedy_tokens(oracle: PreTrainedModel, prompt: list[int], pattern: str, vocabulary: GrammarVocabulary) -> list[int]:
    """The most likely allowed token at each step, from a separate matcher and the oracle's logits of the whole text."""
    matcher, token_ids = make_matcher(vocabulary, LLMatcher.grammar_from_regex(pattern)), []
    while len(token_ids) < MAX_NEW_TOKENS and not matcher.is_stopped():
        mask = np.zeros(vocabulary.num_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        is_allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool)
        logits = oracle(torch.tensor([[*prompt, *token_ids]])).logits[0, -1].numpy()
        token_ids.append(int(np.where(is_allowed, logits, -np.inf).argmax()))
        assert matcher.consume_token(token_ids[-1])
    return token_ids


def test_greedy_tokens_are_the_most_likely_that_the_grammar_allows(tmp_path: Path) -> None:
    """Steps mix requests with and without grammars, and some requests are preempted."""
    oracle = save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, packed=True)
    vocabulary = load_grammar_vocabulary(tmp_path, VOCAB_SIZE, (EOS_ID,))
    decoder = load_token_decoder(tmp_path)
    rng = random.Random(0)
    options = make_options(10, 16, max_tokens_per_forward=64, eos_ids=frozenset({EOS_ID}), max_seqs_per_forward=8)
    driver = EngineDriver(options, rng=rng, forecast=EndsNext(), vocabulary=vocabulary)
    driver.worker = Worker(make_runner(model, info, "cpu", num_blocks=10, num_slots=options.num_slots))
    requests = []
    for number in range(16):
        request = make_request(number, 1, 1, MAX_NEW_TOKENS)
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 50))]
        pattern = [*PATTERNS, ""][number % 5]
        requests.append(
            dataclasses.replace(
                request,
                prompt_ids=np.array(prompt, np.int32),
                sampling=request.sampling._replace(temperature=0.0),
                grammar=LLMatcher.grammar_from_regex(pattern) if pattern else "",
            )
        )
    with one_thread(), torch.inference_mode():
        driver.run(requests)
        found = {delta.request_id: delta for delta in driver.deltas}
        for number, request in enumerate(requests):
            pattern = [*PATTERNS, "(.|\n)*"][number % 5]
            token_ids = found[request.request_id].token_ids
            if request.grammar:
                assert token_ids == greedy_tokens(oracle, request.prompt_ids.tolist(), pattern, vocabulary)
                if found[request.request_id].finish_reason == "stop":
                    assert re.fullmatch(pattern, decoder.decode(token_ids), re.DOTALL)
    assert driver.state.totals.preemptions > 1
    assert sum(delta.finish_reason == "stop" for delta in driver.deltas) > 6
