"""An LLM whose processes are killed, and programs that are interrupted while it starts."""

import asyncio
import dataclasses
import json
import os
import pickle
import re
import resource
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.limits import join
from tests.helpers.processes import assert_all_end
from tests.library.helpers.engine_scripts import launcher_of, pids_of, running_script
from tokasaurus import LLM, AsyncLLM, Sampling
from tokasaurus.config import ServerConfig
from tokasaurus.library.llm import _words

FLAGS = {"dtype": "float32", "device": "cpu", "cpu_isa": "torch", "kv_cache_num_tokens": 4096, "show": False}
GREEDY = Sampling(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = [f"{number}: a prompt" for number in range(200)]
ENDED_S = 10.0
"""A free machine needs a tenth of it, and the start of an engine alone more."""


def test_a_program_sees_warnings_alone_unless_it_wants_more() -> None:
    assert ServerConfig.parse(_words(None, {})).log_level == "warning"
    config = ServerConfig.parse(_words("some/model", {"log_level": "info", "dp_size": 2}))
    assert (config.model, config.log_level, config.dp_size) == ("some/model", "info", 2)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_len", ", did you mean max_num_tokens_per_request?"),
        ("tensor_parallel_size", ", did you mean tp_size?"),
        ("enforce_eager", ", did you mean use_cudagraphs and torch_compile?"),
        ("gpu_memory_utilization", ": toka sizes the KV cache by the memory that is left after loading; kv_cache_num"),
        ("kv_cache_num_token", ", did you mean kv_cache_num_tokens?"),
        ("temperature", ": it belongs into Sampling"),
        ("seed", ": it belongs into Sampling"),
        ("zzz", ", and toka no flag of this name"),
    ],
)
def test_a_wrong_argument_gets_the_hint_of_the_command_line(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^LLM has no argument '{name}'{re.escape(hint)}"):
        LLM(**{name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "max_tokens"),
        ("n_predict", "max_tokens"),
        ("temprature", "temperature"),
        ("maxtokens", "max_tokens"),
    ],
)
def test_a_wrong_sampling_parameter_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^Sampling has no field '{name}'.*{hint}"):
        Sampling(**{name: 1})
    assert pickle.loads(pickle.dumps(GREEDY)) == GREEDY == dataclasses.replace(GREEDY)
    with pytest.raises(TypeError, match=r"^Sampling has no field 'zzz'$"):
        dataclasses.replace(GREEDY, zzz=1)


def test_map_of_an_async_llm_in_the_directory_of_its_call(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts with the call, and the program goes elsewhere meanwhile."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(f'{{"id": {number}, "q": "prompt {number}"}}\n' for number in range(20)))
    sampling = Sampling(temperature=0, max_tokens=3)

    async def main() -> None:
        llm = AsyncLLM(str(model), **FLAGS)
        job = asyncio.create_task(
            llm.map("in.jsonl", "out", prompt="{q}", key="id", sampling=sampling, columns=["token_ids"], progress=False)
        )
        await asyncio.sleep(0.1)
        os.chdir("elsewhere")
        try:
            summary = await job
            (path,) = (tmp_path / "out").iterdir()
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            expected = await llm.generate([row["q"] for row in rows], sampling)
        finally:
            await llm.close()
        assert (summary.num_rows, summary.num_errors, summary.output) == (20, 0, tmp_path / "out")
        assert [row["id"] for row in rows] == list(range(20))
        begun_with = json.loads((tmp_path / "out.toka" / "job.json").read_text())
        assert begun_with["model_files"]["path"] == str(model), "by which a later call knows the model"
        assert [row["answer"] for row in rows] == [result.text for result in expected]
        assert [row["token_ids"] for row in rows] == [result.samples[0].token_ids.tolist() for result in expected]

    asyncio.run(main())


@pytest.mark.long
def test_a_second_start_is_five_seconds_of_two_processors() -> None:
    """Their time and not the clock's, which other work of the machine holds up. The first start may compile kernels."""
    seconds = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with LLM("demo", show=False):
            pass
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds[1:]) <= 2 * 5, seconds


@pytest.mark.long
def test_after_any_death_results_go_on_and_none_is_lost_or_another(model: Path) -> None:
    with LLM(str(model), **FLAGS) as llm:
        engine = llm._client._engine
        started = time.monotonic()
        expected = [result.samples[0].token_ids.tolist() for result in llm.generate(PROMPTS, GREEDY)]
        half_s = (time.monotonic() - started) / 2
        assert all(len(ids) == GREEDY.max_tokens for ids in expected)
        for name in ("launcher", "toka-server", "toka-manager", "toka-worker-0"):
            pids = {psutil.Process(pid).name(): pid for pid in pids_of(engine)} | {"launcher": launcher_of(engine)}
            killing = threading.Timer(half_s, os.kill, (pids[name], signal.SIGKILL))
            killing.start()
            results = llm.generate(PROMPTS, GREEDY)
            join(killing)
            assert [result.error for result in results] == [None] * len(PROMPTS)
            assert [result.samples[0].token_ids.tolist() for result in results] == expected, name
        pids = pids_of(engine)
    assert_all_end(pids, 0.1)


@pytest.mark.long
@pytest.mark.parametrize("what", ["first start", "first start under asyncio.run", "restart"])
def test_an_interrupted_program_does_not_wait_for_a_start(model: Path, what: str) -> None:
    flags = ", ".join(f"{name}={value!r}" for name, value in FLAGS.items())
    text = f"""
import asyncio, os, signal, threading, time
from tests.library.helpers.engine_scripts import launcher_of
from tokasaurus import LLM, AsyncLLM
def interrupt_soon():
    print("soon", flush=True)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
if {what!r} == "first start":
    interrupt_soon()
    LLM({str(model)!r}, {flags})
elif {what!r} == "restart":
    llm = LLM({str(model)!r}, {flags})
    os.kill(launcher_of(llm._client._engine), signal.SIGKILL)
    time.sleep(0.2)
    interrupt_soon()
    llm.generate(["a"])
else:
    async def main():
        interrupt_soon()
        async with AsyncLLM({str(model)!r}, {flags}):
            pass
    asyncio.run(main())
print("not interrupted", flush=True)
"""
    with running_script(text, model) as script:
        assert script.read_line() == "soon"
        started = time.monotonic()
        _, errors = script.wait()
        assert time.monotonic() - started < ENDED_S
        assert errors.endswith("KeyboardInterrupt\n")
        assert script.left_after(ENDED_S, []) == []
