"""How much of the prompts two replicas find cached, by the rule that chooses the replica: real managers, no model.

Chats of several turns whose prompts contain all earlier turns, and questions behind a few long prefixes. Each request
is sent when the one before it in its chat has been answered, after a random pause. One replica with the KV cache of
both shows what could be found. The worker answers at once with random tokens; each manager takes one step per round.
"""

import argparse
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.manager.load import VOCAB_SIZE, InstantWorker, engine_options
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.state.engine_state import make_state
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.server.engine_client.replicas import Replica, choose_replica

MAX_SEQS_PER_FORWARD = 256
STEP_SECONDS = 0.01
MAX_PAUSE_ROUNDS = 60

Rule = Callable[[Sequence[Replica], GenerateRequest], Replica]


class SimulatedReplica:
    """A manager with a worker without a model, and what the server knows of them."""

    def __init__(self, num_kv_tokens: int) -> None:
        options = engine_options(num_kv_tokens, MAX_SEQS_PER_FORWARD, max_tokens_per_forward=2048)
        self.known = Replica(is_ready=True)
        self.known.start(options.limits)
        self._state = make_state(options, None)
        self._steps: deque[ForwardInput] = deque()
        self._engine = Engine(self._state, self._steps.append)
        self._worker = InstantWorker(options.num_slots, STEP_SECONDS)
        self._messages: list[GenerateRequest] = []

    def send(self, request: GenerateRequest) -> None:
        self.known.num_unfinished_sequences += request.num_sequences
        self._messages.append(request)

    def step(self) -> list[SequenceDelta]:
        """Compute one step; return the deltas of the sequences that it ends."""
        messages, self._messages = self._messages, []
        results = [self._worker.forward(self._steps.popleft())] if self._steps else []
        self._engine.step(messages, results)
        deltas, self._state.deltas = self._state.deltas, []
        self.known.num_unfinished_sequences -= len(deltas)
        return deltas


@dataclass
class Chat:
    """A sequence of requests, each of which begins with the earlier ones and their answers."""

    number: int
    turns: list[NDArray[np.int32]]
    """What each turn adds to the prompt, int32 [tokens]."""
    answer_tokens: int
    prompt: NDArray[np.int32]
    begins_at: int = 0
    """The round in which the next turn is sent."""

    def next_request(self) -> GenerateRequest:
        self.prompt = np.concatenate([self.prompt, self.turns.pop(0)])
        length = len(self.prompt) + self.answer_tokens
        return GenerateRequest(
            f"{self.number}-{len(self.turns)}",
            self.prompt,
            1,
            self.answer_tokens,
            SamplingParams(),
            length,
            (),
            True,
            False,
        )


@dataclass(frozen=True)
class Found:
    """asked: prompt tokens of all requests. cached: those found in a KV cache. max_apart: largest difference between
    the unfinished sequences of two replicas."""

    asked: int
    cached: int
    max_apart: int


def make_chats(num_chats: int, num_turns: int, seed: int) -> list[Chat]:
    """Chats behind one system prompt of 60 tokens; a turn adds 20 to 120 tokens and is answered by 20 to 150."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> NDArray[np.int32]:
        return rng.integers(1, VOCAB_SIZE, rng.integers(low, high + 1), dtype=np.int32)

    system = draw(60, 60)
    return [
        Chat(number, [draw(20, 120) for _ in range(num_turns)], int(rng.integers(20, 151)), system.copy())
        for number in range(num_chats)
    ]


def make_questions(num_questions: int, num_prefixes: int, seed: int) -> list[Chat]:
    """Questions of 60 tokens, each behind one of a few prefixes of 1,000 tokens, answered by 100 tokens."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(1, VOCAB_SIZE, (num_prefixes, 1000), dtype=np.int32)
    return [
        Chat(number, [rng.integers(1, VOCAB_SIZE, 60, dtype=np.int32)], 100, prefixes[number % num_prefixes])
        for number in range(num_questions)
    ]


def simulate(chats: list[Chat], num_replicas: int, num_kv_tokens: int, rule: Rule, seed: int = 0) -> Found:
    """Run all chats. num_kv_tokens: of all replicas together."""
    rng = random.Random(seed)
    replicas = [SimulatedReplica(num_kv_tokens // num_replicas) for _ in range(num_replicas)]
    waiting = [replace(chat, turns=list(chat.turns), begins_at=rng.randrange(MAX_PAUSE_ROUNDS)) for chat in chats]
    open_chats: dict[str, Chat] = {}
    found: Counter[str] = Counter()
    max_apart = num_round = 0
    while waiting or open_chats:
        for chat in [chat for chat in waiting if chat.begins_at <= num_round]:
            waiting.remove(chat)
            request = chat.next_request()
            open_chats[request.request_id] = chat
            chosen = rule([replica.known for replica in replicas], request)
            next(replica for replica in replicas if replica.known is chosen).send(request)
            found["asked"] += len(request.prompt_ids)
        loads = [replica.known.num_unfinished_sequences for replica in replicas]
        max_apart = max(max_apart, max(loads) - min(loads))
        for delta in [delta for replica in replicas for delta in replica.step()]:
            chat = open_chats.pop(delta.request_id)
            found["cached"] += delta.num_cached_tokens
            if chat.turns:
                chat.prompt = np.concatenate([chat.prompt, np.array(delta.token_ids, np.int32)])
                chat.begins_at = num_round + rng.randrange(MAX_PAUSE_ROUNDS)
                waiting.append(chat)
        num_round += 1
    return Found(found["asked"], found["cached"], max_apart)


def choose_least_busy(replicas: Sequence[Replica], _request: GenerateRequest) -> Replica:
    return min(replicas, key=lambda replica: replica.num_unfinished_sequences)


def choose_at_random(rng: random.Random, replicas: Sequence[Replica], _request: GenerateRequest) -> Replica:
    return rng.choice(replicas)


def print_found(title: str, chats: list[Chat], num_kv_tokens: int, console: Console) -> None:
    rules: list[tuple[str, int, Rule]] = [
        ("one", 1, choose_replica),
        ("two, by prefix and load", 2, choose_replica),
        ("two, by load alone", 2, choose_least_busy),
        ("two, at random", 2, partial(choose_at_random, random.Random(0))),
    ]
    table = Table(title=title, title_justify="left")
    for column in ("replicas", "prompt tokens", "found in cache", "share of one's", "most apart"):
        table.add_column(column, justify="left" if column == "replicas" else "right")
    best = 0
    for label, num_replicas, rule in rules:
        found = simulate(chats, num_replicas, num_kv_tokens, rule)
        best = best or found.cached
        table.add_row(
            label, f"{found.asked:,}", f"{found.cached:,}", f"{found.cached / best:.3f}", str(found.max_apart)
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallelism.prefix_routing", description=__doc__)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    console = Console()
    chats = make_chats(args.chats, args.turns, seed=1)
    print_found(f"{args.chats} chats of {args.turns} turns", chats, 400_000, console)
    print_found(f"{args.chats} chats of {args.turns} turns, little memory", chats, 20_000, console)
    print_found("512 questions behind 8 prefixes", make_questions(512, 8, seed=1), 400_000, console)


if __name__ == "__main__":
    main()
