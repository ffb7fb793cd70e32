"""Hidden states and tokens between pipeline stages, over groups that run their transfers one after another."""

import random
from collections import deque

import numpy as np
import pytest
import torch

from tests.model.parallel.helpers.stage_transport import Deadlock, Transport, link_stages, stage_meshes
from tokasaurus.model.parallel.stage_links import StageLinks

MAX_TOKENS, HIDDEN_SIZE, NUM_SLOTS = 9, 4, 8


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    transport = Transport()
    transport.install(monkeypatch)
    return transport


class Stages:
    """Stages that add 1 to each hidden state. The sampled token of a slot is the number of the step times 100, and the
    slot."""

    def __init__(self, pp_size: int, shares_group: bool = False) -> None:
        self.links = link_stages(stage_meshes(pp_size, shares_group), MAX_TOKENS, HIDDEN_SIZE, NUM_SLOTS)
        self.last_tokens = torch.zeros(NUM_SLOTS, dtype=torch.int64)
        """Of the first stage."""
        self.num_run = [0] * pp_size

    def expect(self, num_tokens: int) -> None:
        for links in self.links:
            links.expect_hidden(num_tokens)

    def run(self, stage: int, slots: list[int], num_padded: int, decodes: bool = True) -> None:
        """This stage's next step, of one token for each of the slots, some of which are in several steps.

        decodes: whether it needs their last tokens."""
        links, step = self.links[stage], self.num_run[stage]
        self.num_run[stage] += 1
        hidden = torch.full((num_padded, HIDDEN_SIZE), float(step))
        if links.is_first:
            links.await_tokens(np.array(slots if decodes else [], np.int32), self.last_tokens)
        else:
            hidden = links.receive_hidden(len(slots), num_padded)
            assert (hidden[: len(slots)] == step + stage).all()
            assert (hidden[len(slots) :] == 0).all()
        hidden += 1
        on_device = torch.tensor(slots)
        if links.is_last:
            links.send_tokens(step * 100 + on_device)
        else:
            links.send_hidden(hidden[: len(slots)])
        hidden.fill_(torch.nan)
        if links.is_first:
            links.expect_tokens(np.array(slots), on_device, self.last_tokens)
        links.end_step()


def run_in_order(stages: Stages, steps: list[list[int]], max_ahead: int, rng: random.Random) -> None:
    """Run all steps; the first stage is at most `max_ahead` steps before the last, and all steps that it may run are
    expected. Before a step, the first stage has the last token of each of its slots."""
    pp_size = len(stages.links)
    last_step: dict[int, int] = {}
    num_expected = 0
    while stages.num_run[-1] < len(steps):
        while num_expected < min(len(steps), stages.num_run[-1] + max_ahead):
            stages.expect(len(steps[num_expected]))
            num_expected += 1
        may_run = [stage for stage in range(1, pp_size) if stages.num_run[stage] < stages.num_run[stage - 1]]
        step = stages.num_run[0]
        known = step < num_expected and all(last_step.get(slot, -1) < stages.num_run[-1] for slot in steps[step])
        stage = rng.choice([*may_run, *([0] if known else [])])
        slots = steps[stages.num_run[stage]]
        stages.run(stage, slots, len(slots) + rng.randint(0, 1))
        if stage == 0:
            assert stages.last_tokens[slots].tolist() == [
                last_step[slot] * 100 + slot if slot in last_step else 0 for slot in slots
            ]
            last_step.update(dict.fromkeys(slots, step))


@pytest.mark.parametrize("pp_size", [2, 3, 4])
@pytest.mark.parametrize("max_ahead", [1, 2, 5])
def test_each_stage_gets_what_the_one_before_sent_and_the_first_the_tokens(
    pp_size: int, max_ahead: int, transport: Transport
) -> None:
    rng = random.Random(pp_size)
    steps = [rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)) for _ in range(60)]
    stages = Stages(pp_size)
    run_in_order(stages, steps, max_ahead, rng)
    for links in stages.links:
        links.finish()
    assert not any(transport.waiting.values())
    assert len({tensor.data_ptr() for tensor in transport.sent if tensor.is_floating_point()}) <= 2 * (pp_size - 1)


def test_a_receive_that_is_posted_early_does_not_hold_up_the_send_before_it(transport: Transport) -> None:
    """The second step of a microbatch is known before the first has left the pipeline, and needs its tokens. With one
    group for all hidden states, nothing could go on: the middle stage's receive of the second step would come first."""
    for shares_group in (True, False):
        transport.waiting.clear()
        stages = Stages(3, shares_group)
        stages.expect(2)
        stages.expect(2)
        stages.run(0, [1, 2], 2)
        stages.run(1, [1, 2], 2)
        if shares_group:
            with pytest.raises(Deadlock):
                stages.run(2, [1, 2], 2)
            continue
        stages.run(2, [1, 2], 2)
        for stage in range(3):
            stages.run(stage, [1, 2], 2)
        assert stages.last_tokens.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_hidden_states_stay_until_their_step_ends(transport: Transport) -> None:
    """However many steps are expected and have been sent."""
    first, last = link_stages(stage_meshes(2), MAX_TOKENS, HIDDEN_SIZE, NUM_SLOTS)
    sizes = [3, 5, 2, 9, 1, 4]
    for size in sizes:
        last.expect_hidden(size)
    unsent = deque(enumerate(sizes))

    def send(count: int) -> None:
        for _ in range(min(count, len(unsent))):
            step, size = unsent.popleft()
            first.send_hidden(torch.full((size, HIDDEN_SIZE), float(step)))
        transport.run()

    send(2)
    for step, size in enumerate(sizes):
        hidden = last.receive_hidden(size, size)
        send(1)
        assert hidden.shape == (size, HIDDEN_SIZE)
        assert (hidden == step).all()
        last.end_step()
    assert not unsent


def test_tokens_that_no_decode_row_needs_do_not_pile_up(transport: Transport) -> None:
    """As with requests for one token each."""
    stages = Stages(2)
    for number in range(200):
        for stage in range(2):
            stages.run(stage, [number % NUM_SLOTS], 1, decodes=False)
    assert len(stages.links[0]._tokens) <= 64
    assert (stages.last_tokens >= (200 - 64 - NUM_SLOTS) * 100).all()
    for links in stages.links:
        links.finish()
    assert not any(transport.waiting.values())


def test_a_stage_that_does_not_take_holds_up_the_one_before_after_two_steps(transport: Transport) -> None:
    first, last = link_stages(stage_meshes(2), MAX_TOKENS, HIDDEN_SIZE, NUM_SLOTS)
    assert isinstance(last, StageLinks)
    for _ in range(2):
        first.send_hidden(torch.ones((3, HIDDEN_SIZE)))
    with pytest.raises(Deadlock):
        first.send_hidden(torch.ones((3, HIDDEN_SIZE)))
    assert len(transport.sent) == 2
