"""Adapters against a real server: each request's greedy tokens are those of the model that peft merges its adapter
into, whatever else runs, is loaded, unloaded or killed."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.helpers.rollouts import RolloutServer, make_prompts, rollout_server
from tests.end_to_end.helpers.toka_process import free_port, starting_toka, wait_for
from tests.helpers.peft_adapters import KINDS, greedy_ids, merged_model, save_adapter
from tokasaurus import LLM, Client, Sampling

NUM_TOKENS = 24
PROMPTS = make_prompts(8)
NAMES = [f"adapter-{seed}" for seed in range(2 * len(KINDS))]
"""Loaded at the start."""


class Oracle:
    """Greedy tokens by transformers, computed once."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self._directory = directory
        self._models: dict[int | None, Any] = {}
        self._known: dict[tuple[int | None, tuple[int, ...]], list[int]] = {}

    def adapter(self, seed: int) -> Path:
        path = self._directory / str(seed)
        return path if path.exists() else save_adapter(self.model, path, seed)

    def ids(self, seed: int | None, prompt: Sequence[int]) -> list[int]:
        """seed: of the adapter; None for the model itself."""
        key = seed, tuple(prompt)
        if key not in self._known:
            if seed not in self._models:
                self._models[seed] = merged_model(self.model, None if seed is None else self.adapter(seed))
            self._known[key] = greedy_ids(self._models[seed], prompt, NUM_TOKENS)
        return self._known[key]


@pytest.fixture(scope="module")
def oracle(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(models[0], tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def adapted(models: list[Path], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    """With eight adapters, of which two are in a step at a time."""
    lora = json.dumps({name: str(oracle.adapter(seed)) for seed, name in enumerate(NAMES)})
    data = tmp_path_factory.mktemp("data")
    with rollout_server(models[0], f"lora={lora}", "max_loras=2", f"data_dir={data}") as server:
        yield server


def ask(server: RolloutServer, model: str | None, prompt: Sequence[int]) -> httpx.Response:
    fields = {"prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return server.http.post("/v1/completions", json={"model": model, **fields, "return_token_ids": True})


def ids(server: RolloutServer, model: str | None, prompt: Sequence[int]) -> list[int]:
    answer = ask(server, model, prompt)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def load(server: RolloutServer, name: str, source: Path, **fields: object) -> httpx.Response:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(source), **fields})


def unload(server: RolloutServer, name: str) -> None:
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def assert_all_right(server: RolloutServer, oracle: Oracle, num_requests: int = 40) -> None:
    """Requests of all adapters and of none at once."""
    kinds = [None, *range(len(NAMES))]
    asked = [(kinds[n % len(kinds)], PROMPTS[n // len(kinds) % len(PROMPTS)]) for n in range(num_requests)]
    with ThreadPoolExecutor(num_requests) as pool:
        found = list(pool.map(lambda one: ids(server, None if one[0] is None else NAMES[one[0]], one[1]), asked))
    assert found == [oracle.ids(seed, prompt) for seed, prompt in asked]


def test_requests_of_all_adapters_and_of_none_mixed_equal_the_merged_models(
    adapted: RolloutServer, oracle: Oracle
) -> None:
    texts = {tuple(oracle.ids(seed, PROMPTS[0])) for seed in (None, *range(len(NAMES)))}
    assert len(texts) == len(NAMES) + 1, "each changes the text"
    assert_all_right(adapted, oracle)


def test_they_are_listed_and_unknown_names_are_never_the_model(adapted: RolloutServer, oracle: Oracle) -> None:
    base, *listed = adapted.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [(name, base["id"]) for name in NAMES]
    assert ask(adapted, "adapter-9", PROMPTS[0]).status_code == 404
    assert load(adapted, "adapter-9", oracle.adapter(9)).status_code == 200
    assert ids(adapted, "adapter-9", PROMPTS[0]) == oracle.ids(9, PROMPTS[0])
    unload(adapted, "adapter-9")
    assert ask(adapted, "adapter-9", PROMPTS[0]).status_code == 404


def test_a_reload_under_one_name_meets_no_cached_prompt_of_the_one_before(
    adapted: RolloutServer, oracle: Oracle
) -> None:
    def cached(name: str) -> tuple[list[int], int]:
        answer = ask(adapted, name, PROMPTS[1]).json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    load(adapted, "policy", oracle.adapter(12))
    assert cached("policy") == (oracle.ids(12, PROMPTS[1]), 0)
    text, num_cached = cached("policy")
    assert (text, num_cached > 0) == (oracle.ids(12, PROMPTS[1]), True)
    load(adapted, "same", oracle.adapter(12))
    assert cached("same") == (text, num_cached), "two names of one content share"
    assert load(adapted, "policy", oracle.adapter(13)).status_code == 400
    assert cached("policy") == (text, num_cached)
    assert load(adapted, "policy", oracle.adapter(13), load_inplace=True).status_code == 200
    assert cached("policy") == (oracle.ids(13, PROMPTS[1]), 0)
    assert cached("same") == (text, num_cached)
    for name in ("policy", "same"):
        unload(adapted, name)


def test_a_bad_load_is_a_400_and_changes_nothing(
    adapted: RolloutServer, oracle: Oracle, models: list[Path], tmp_path: Path
) -> None:
    def changed(name: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        path = save_adapter(models[0], tmp_path / name, 0)
        weights = load_file(path / "adapter_model.safetensors")
        first = next(key for key in weights if "lora_A" in key)
        save_file(weights | {first: tensor(weights[first])}, path / "adapter_model.safetensors")
        return path

    for source, words in (
        (changed("nan", lambda tensor: tensor * float("nan")), "not finite"),
        (changed("other", lambda tensor: torch.ones(len(tensor), 65)), "the base model's is"),
        (save_adapter(models[0], tmp_path / "large", 0, r=65, target_modules=["q_proj"]), "max_lora_rank=64"),
        (save_adapter(models[0], tmp_path / "dora", 0, use_dora=True, target_modules=["q_proj"]), "use_dora"),
    ):
        answer = load(adapted, NAMES[0], source, load_inplace=True)
        message = answer.json()["error"]["message"]
        assert (answer.status_code, words in message, "toka-" in message) == (400, True, False), message
    assert load(adapted, NAMES[0], tmp_path / "absent", load_inplace=True).status_code == 404
    assert len(adapted.http.get("/v1/models").json()["data"]) == 1 + len(NAMES)
    assert_all_right(adapted, oracle, 10)


@pytest.mark.parametrize("reloads", [False, True])
def test_what_runs_ends_with_the_adapter_that_it_began_with(
    adapted: RolloutServer, oracle: Oracle, reloads: bool
) -> None:
    load(adapted, "policy", oracle.adapter(4))
    body = {"model": "policy", "prompt": PROMPTS[2], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with adapted.http.stream("POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}) as one:
        lines = one.iter_lines()
        first = next(lines)
        if reloads:
            load(adapted, "policy", oracle.adapter(5), load_inplace=True)
            assert ids(adapted, "policy", PROMPTS[2]) == oracle.ids(5, PROMPTS[2])
        else:
            unload(adapted, "policy")
            assert ask(adapted, "policy", PROMPTS[2]).status_code == 404
        events = [json.loads(line[6:]) for line in [first, *lines] if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    token_ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert (len(token_ids), token_ids[:NUM_TOKENS]) == (400, oracle.ids(4, PROMPTS[2]))
    (spans,) = [choice["weight_versions"] for choice in choices if "weight_versions" in choice]
    assert [span["version"].partition("@")[0] for span in spans] == ["policy"]
    if reloads:
        unload(adapted, "policy")


def test_updates_take_an_adapter_before_the_model(adapted: RolloutServer, oracle: Oracle) -> None:
    """As a trainer sends it between pause and resume."""
    prompt = PROMPTS[3]
    for seed, version in ((4, "1"), (5, "2")):
        adapted.post("/pause", mode="keep", clear_cache="false")
        assert adapted.update(oracle.adapter(seed)) == version
        adapted.post("/resume")
        assert ids(adapted, None, prompt) == oracle.ids(seed, prompt)
        assert ids(adapted, "first", prompt) == oracle.ids(seed, prompt)
        assert ids(adapted, NAMES[1], prompt) == oracle.ids(1, prompt)
        assert ask(adapted, None, prompt).json()["weight_version"] == adapted.version == version
    assert adapted.update(oracle.model, version="0") == "0"
    assert_all_right(adapted, oracle, 10)


def test_trl_loads_each_version_in_a_pause_and_unloads_stale_ones(adapted: RolloutServer, oracle: Oracle) -> None:
    """AsyncGRPOTrainer's select_adapter_sync and _sync_weight_lora of TRL 1.16, with max_staleness=1."""
    info = adapted.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["lora_config"] == {"max_lora_rank": 64, "max_loras": 2}
    for version in range(1, 6):
        name = f"trl-policy-v{version}"
        adapted.post("/pause", mode="keep")
        assert load(adapted, name, oracle.adapter(3 + version), load_inplace=False).status_code == 200
        adapted.post("/resume")
        if version > 2:
            unload(adapted, f"trl-policy-v{version - 2}")
            assert ask(adapted, f"trl-policy-v{version - 2}", PROMPTS[0]).status_code == 404
        for number in range(max(1, version - 1), version + 1):
            assert ids(adapted, f"trl-policy-v{number}", PROMPTS[0]) == oracle.ids(3 + number, PROMPTS[0])
    for version in (4, 5):
        unload(adapted, f"trl-policy-v{version}")


def test_prime_rl_loads_each_step_under_one_name(adapted: RolloutServer, oracle: Oracle) -> None:
    """Its load_lora_adapter and unload_lora_adapter, with its own route that replaces."""
    for seed in (4, 5, 6):
        body = {"lora_name": "r8-1e-4", "lora_path": oracle.adapter(seed).as_posix()}
        assert adapted.http.post("/load_lora_adapter", json=body).status_code == 200
        assert ids(adapted, "r8-1e-4", PROMPTS[4]) == oracle.ids(seed, PROMPTS[4])
    absent = adapted.http.post("/load_lora_adapter", json={"lora_name": "r8-1e-4", "lora_path": "/nowhere"})
    assert absent.status_code == 404, "it tries again: a network's disk may be late"
    unload(adapted, "r8-1e-4")


def test_skyrl_samples_by_the_adapters_name(adapted: RolloutServer, oracle: Oracle) -> None:
    body = {"lora_name": "skyrl-lora", "lora_path": str(oracle.adapter(5))}
    for _ in range(2):
        assert adapted.http.post("/skyrl/v1/load_lora_adapter", json=body).status_code == 200
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    request = {"model": "skyrl-lora", "token_ids": PROMPTS[5], "sampling_params": sampling}
    answer = adapted.post("/inference/v1/generate", request)
    assert (answer["model"], answer["choices"][0]["token_ids"]) == ("skyrl-lora", oracle.ids(5, PROMPTS[5]))
    unload(adapted, "skyrl-lora")


def test_batches_and_the_library_name_adapters(adapted: RolloutServer, oracle: Oracle) -> None:
    sampling = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, adapter=NAMES[1])
    with Client(adapted.toka.url) as client:
        results = client.generate(PROMPTS, sampling)
        assert [one.samples[0].token_ids.tolist() for one in results] == [oracle.ids(1, one) for one in PROMPTS]
        assert results[0].samples[0].weight_version.startswith(f"{NAMES[1]}@")  # type: ignore[union-attr]
        scores = client.score(PROMPTS[:1], [oracle.ids(1, PROMPTS[0])], adapter=NAMES[1])
        assert scores[0].logprobs == pytest.approx(results[0].samples[0].logprobs, abs=1e-3)
        (unknown,) = client.generate(["a"], Sampling(adapter="nobody"), progress=False)
        assert unknown.error is not None
        assert "nobody" in str(unknown.error)
    names = [None, *NAMES, "nobody"]
    lines = [
        {
            **{"custom_id": str(number), "method": "POST", "url": "/v1/completions"},
            "body": {"model": name or "first", "prompt": PROMPTS[6], "max_tokens": NUM_TOKENS, "temperature": 0}
            | {"ignore_eos": True, "return_token_ids": True},
        }
        for number, name in enumerate(names)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    file = adapted.http.post("/v1/files", files={"file": content}, data={"purpose": "batch"}).json()
    request = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = adapted.post("/v1/batches", request)

    def now() -> dict[str, Any]:
        return dict(adapted.http.get(f"/v1/batches/{batch['id']}").json())

    wait_for(lambda: now()["status"] == "completed", 60)
    output = adapted.http.get(f"/v1/files/{now()['output_file_id']}/content").text.splitlines()
    found = {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in map(json.loads, output)}
    assert found == {str(n): oracle.ids(n - 1 if n else None, PROMPTS[6]) for n in range(len(names) - 1)}
    (error,) = map(json.loads, adapted.http.get(f"/v1/files/{now()['error_file_id']}/content").text.splitlines())
    assert error["response"]["status_code"] == 404


@pytest.mark.parametrize("title", ["toka-worker", "toka-manager", "toka-server"])
def test_adapters_are_there_again_after_a_kill(adapted: RolloutServer, oracle: Oracle, title: str) -> None:
    load(adapted, "later", oracle.adapter(7))
    pid = next(pid for name, pid in adapted.toka.children().items() if name.startswith(title))
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, adapted, NAMES[n % 4], PROMPTS[n % 8]) for n in range(16)]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in adapted.toka.children().values(), 60)
        for number, one in enumerate(asked):
            with suppress(httpx.TransportError):  # of the server that was killed
                answer = one.result()
                if title != "toka-server":
                    assert answer.status_code == 200, answer.text
                if answer.status_code == 200:
                    expected = oracle.ids(number % 4, PROMPTS[number % 8])
                    assert answer.json()["choices"][0]["token_ids"] == expected

    def is_whole() -> bool:
        with suppress(httpx.TransportError):
            return adapted.is_whole()
        return False

    wait_for(is_whole, 120)
    assert_all_right(adapted, oracle, 20)
    assert ids(adapted, "later", PROMPTS[7]) == oracle.ids(7, PROMPTS[7])
    unload(adapted, "later")


@pytest.mark.parametrize("flag", ["dp_size=2", pytest.param("tp_size=2", marks=pytest.mark.long), "pp_size=2"])
def test_replicas_ranks_and_stages_have_the_same_adapters(models: list[Path], oracle: Oracle, flag: str) -> None:
    lora = json.dumps({name: str(oracle.adapter(seed)) for seed, name in enumerate(NAMES)})
    with rollout_server(models[0], f"lora={lora}", flag) as server:
        info = server.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        # TRL sends no adapters to vLLM's replicas, of which a load reaches one.
        assert info["parallel_config"]["data_parallel_size"] == 1
        assert_all_right(server, oracle)
        assert load(server, "policy", oracle.adapter(4)).status_code == 200
        with ThreadPoolExecutor(16) as pool:
            for seed in (4, 5):
                load(server, "policy", oracle.adapter(seed), load_inplace=True)
                found = pool.map(lambda number: ids(server, "policy", PROMPTS[number % 8]), range(16))
                assert list(found) == [oracle.ids(seed, PROMPTS[number % 8]) for number in range(16)]
        if flag == "dp_size=2":
            os.kill(server.toka.children()["toka-worker1-0"], signal.SIGKILL)
            assert load(server, "policy", oracle.adapter(6), load_inplace=True).status_code == 200
            wait_for(server.is_whole, 120)
            with ThreadPoolExecutor(32) as pool:
                found = pool.map(lambda number: ids(server, "policy", PROMPTS[number % 8]), range(32))
                assert list(found) == [oracle.ids(6, PROMPTS[number % 8]) for number in range(32)]
        assert server.toka.stop() == 0


@pytest.mark.parametrize("case", ["absent", "own name", "other model"])
def test_a_start_with_a_wrong_adapter_ends_with_one_line(
    models: list[Path], oracle: Oracle, tmp_path: Path, case: str
) -> None:
    name, source, words = "sql", oracle.adapter(0), ""
    if case == "absent":
        source, words = tmp_path / "absent", f"lora: sql: {tmp_path}/absent has no adapter_config.json"
    elif case == "own name":
        name, words = "first", "lora: 'first' is a name of the model itself"
    else:
        source = save_adapter(models[0], tmp_path / "wide", 0)
        weights = load_file(source / "adapter_model.safetensors")
        wide = {key: torch.ones(len(one), 65) if "lora_A" in key else one for key, one in weights.items()}
        save_file(wide, source / "adapter_model.safetensors")
        words = "a replica cannot get the adapter 'sql': the adapter is for"
    flags = (f"model={models[0]}", "dtype=float32", "kv_cache_num_tokens=4096")
    with starting_toka(free_port(), *flags, f"lora={json.dumps({name: str(source)})}") as toka:
        assert toka.process.wait(timeout=120) == 2
    assert words in toka.lines[-1], toka.lines
    assert not any("Traceback" in line for line in toka.lines)


def test_the_library_starts_an_engine_with_adapters(models: list[Path], oracle: Oracle, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "text": f"row {n}"}) + "\n" for n in range(6)))

    flags: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_num_tokens": 8192,
        "show": False,
        "sampling_defaults": "neutral",
    }
    with LLM(str(models[0]), lora={"one": str(oracle.adapter(1))}, **flags) as llm:
        texts = {}
        for name in (None, "one"):
            own = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, adapter=name)
            (result,) = llm.generate([PROMPTS[0]], own)
            assert result.samples[0].token_ids.tolist() == oracle.ids(None if name is None else 1, PROMPTS[0])
            summary = llm.map(
                str(rows),
                str(tmp_path / f"out-{name}"),
                prompt="{text}",
                key="id",
                sampling=Sampling(temperature=0, max_tokens=8, ignore_eos=True, adapter=name),
            )
            assert summary.num_errors == 0
            parts = sorted((tmp_path / f"out-{name}").glob("*.jsonl"))
            texts[name] = [json.loads(line)["text"] for part in parts for line in part.read_text().splitlines()]

    assert len(texts["one"]) == 6
