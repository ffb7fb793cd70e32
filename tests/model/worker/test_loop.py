"""The worker's step loop: what it says of the time between steps."""

import threading
import time
from pathlib import Path

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner
from tokasaurus.messages.channel import make_channel
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.warmup import ForwardLimits, single_token

LIMITS = ForwardLimits(max_tokens=64, max_seqs=4, context_length=64, vocab_size=VOCAB_SIZE)


def test_the_time_until_the_next_step_is_idle(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    runner = make_runner(model, info, "torch")
    inputs_in, inputs = make_channel()
    outputs_out, outputs = make_channel()
    worker = threading.Thread(target=run_steps, args=(runner, inputs_in, outputs, 0, lambda _: ""))
    worker.start()
    answers = []
    began_s = time.perf_counter()
    for pause_s in (0.0, 0.2, 0.0):
        time.sleep(pause_s)
        inputs.send(single_token(LIMITS))
        answers.append(outputs_out.receive())
    whole_s = time.perf_counter() - began_s
    inputs.close()
    worker.join(60)
    first, second, third = (answer.idle_seconds for answer in answers)
    assert first == 0
    assert second >= 0.2
    assert third > 0
    # The steps themselves are not idle. A step's forward_seconds begin with the host's work, when the device is idle.
    assert second + third < whole_s
