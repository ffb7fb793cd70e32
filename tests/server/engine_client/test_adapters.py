"""Adapters of all replicas: loaded on each or on none, kept as long as a name or a request needs them, and given to
replicas and servers that start again."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server.helpers.adapter_files import (
    digest_of,
    engine_with_adapters,
    has,
    keeping,
    loads,
    refuses_loads,
    save_adapter,
)
from tests.server.helpers.client_driver import make_request, run_with, until
from tests.server.helpers.fake_engine import FakeEngine, never, start_again
from tokasaurus.messages.commands import EngineCommand, Held, LoadAdapter, NamedAdapter, Pause, UpdateWeights
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import NO_ADAPTERS
from tokasaurus.server.engine_client import adapters
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.errors import EngineDied, InvalidRequest, ModelNotFound, NotFound


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "GRACE_S", 0.05)


@pytest.fixture
def files(tmp_path: Path) -> Callable[[int], Path]:
    """Makes the adapter of a seed."""
    return lambda seed: save_adapter(tmp_path / f"adapter-{seed}", seed)


Files = Callable[[int], Path]


async def load(client: EngineClient, name: str, source: Path, replaces: bool = True) -> NamedAdapter:
    return await client.control.adapters.load(name, str(source), replaces=replaces, param="lora_path")


async def update(client: EngineClient, directory: Path | str, mode: str = "keep", **fields: bool) -> str:
    return await client.control.update(str(directory), None, clears_cache=True, mode=mode, **fields)  # type: ignore[arg-type]


async def until_up(client: EngineClient, count: int) -> None:
    while len(client._up) != count:  # noqa: ASYNC110 - the client signals no event for this
        await asyncio.sleep(0.005)


def asking(adapter: NamedAdapter, request_id: str = "a") -> GenerateRequest:
    return replace(make_request(request_id, [1]), adapter=adapter.digest, adapter_version=adapter.version)


def copies(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def test_a_load_reaches_every_replica_without_a_pause_and_its_copy_outlives_its_source(
    tmp_path: Path, files: Files
) -> None:
    async def use(client: EngineClient) -> None:
        source = files(1)
        adapter = await load(client, "sql", source)
        save_adapter(source, 2)  # a trainer overwrites it
        for engine in engines:
            assert loads(engine) == [("load", adapter.digest)]
            assert not any(isinstance(command, Pause) for command in engine.commands)
            (command,) = (one for one in engine.commands if isinstance(one, LoadAdapter))
            assert digest_of(Path(command.directory)) == adapter.digest
        assert (adapter.name, adapter.source) == ("sql", str(source))
        assert adapter.version == f"sql@{adapter.digest[:12]}"
        assert client.control.held == Held(adapters=(adapter,))
        assert copies(own) == {adapter.digest}

    engines, own = [engine_with_adapters(), engine_with_adapters()], tmp_path / "own"
    run_with(engines, use, predecessors=keeping(own))


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_load_that_one_replica_refuses_changes_nothing(tmp_path: Path, files: Files, refusing: int) -> None:
    async def use(client: EngineClient) -> None:
        before = await load(client, "sql", files(1))
        engines[refusing].on_command = refuses_loads
        with pytest.raises(InvalidRequest, match=f"^lora_path: {files(2)}: no room$"):
            await load(client, "sql", files(2))
        assert [has(engine) for engine in engines] == [{before.digest}] * 2
        assert client.control.held.adapters == (before,)
        assert copies(own) == {before.digest}
        await load(client, "other", files(1))  # what is loaded is not loaded again
        assert [len(loads(engine)) for engine in engines] == [3, 3]

    engines, own = [engine_with_adapters(), engine_with_adapters()], tmp_path / "own"
    run_with(engines, use, predecessors=keeping(own))


def test_bad_sources_are_refused_before_any_replica_is_told(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        cut = files(2)
        weights = cut / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        without = files(3)
        (without / weights.name).unlink()
        dora = save_adapter(tmp_path / "dora", use_dora=True)
        for source, error, words in (
            (tmp_path / "absent", NotFound, f"lora_path: {tmp_path}/absent has no adapter_config.json"),
            (without, NotFound, f"{without} has no {weights.name}"),
            (cut, InvalidRequest, f"lora_path: {weights}"),
            (dora, InvalidRequest, "use_dora = True is not supported"),
            (Path("\0"), NotFound, "has no adapter_config.json"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await load(client, "sql", source)
            assert type(refused.value) is error
            assert words in refused.value.message
        with pytest.raises(InvalidRequest, match=r"adapter_config.json makes the rank 3"):
            await client.control.adapters.load(
                "sql", ({"peft_type": "LORA", "r": 3}, (files(1) / weights.name).read_bytes()), replaces=True, param="a"
            )
        assert loads(engine) == []
        assert client.control.held == Held()
        assert copies(own) == set()

    engine, own = engine_with_adapters(), tmp_path / "own"
    run_with([engine], use, predecessors=keeping(own))


def test_a_server_without_adapters_says_what_to_set(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        with pytest.raises(InvalidRequest, match="lora= or max_loras= allow them"):
            await load(client, "sql", files(1))

    run_with([FakeEngine()], use)
    run_with([FakeEngine()], use, predecessors=keeping(tmp_path / "own"))
    assert NO_ADAPTERS.endswith("lora= or max_loras= allow them")


def test_a_name_is_taken_until_it_is_unloaded_unless_the_content_is_the_same(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        first = await load(client, "sql", files(1), replaces=False)
        assert (await load(client, "sql", files(1), replaces=False)).digest == first.digest
        with pytest.raises(InvalidRequest, match="'sql' is loaded already"):
            await load(client, "sql", files(2), replaces=False)
        assert client.control.adapters.unload("sql")
        assert not client.control.adapters.unload("sql")
        assert (await load(client, "sql", files(2), replaces=False)).digest == digest_of(files(2))

    run_with([engine_with_adapters()], use, predecessors=keeping(tmp_path / "own"))


@pytest.mark.parametrize("reloads", [False, True])
def test_an_adapter_is_forgotten_once_no_name_and_no_request_has_it(
    tmp_path: Path, files: Files, reloads: bool
) -> None:
    async def use(client: EngineClient) -> None:
        adapter = await load(client, "sql", files(1))
        await load(client, "same", files(1))
        call = asyncio.ensure_future(client.generate([asking(adapter)]))
        await until(engine, lambda engine: bool(engine.requests))
        assert engine.requests[0].adapter == adapter.digest
        new = set()
        if reloads:
            new = {(await load(client, "sql", files(2))).digest}
        else:
            client.control.adapters.unload("sql")
        await asyncio.sleep(0.2)
        assert has(engine) == {adapter.digest} | new  # another name, and a request
        client.control.adapters.unload("same")
        await asyncio.sleep(0.2)
        assert has(engine) == {adapter.digest} | new  # the request
        call.cancel()
        await asyncio.wait([call])
        await until(engine, lambda engine: has(engine) == new)
        assert engine.cancelled == ["a"]
        await asyncio.sleep(0.1)
        assert copies(own) == new
        with pytest.raises(ModelNotFound, match="'sql' does not exist"):
            await client.generate([asking(adapter, "b")])

    engine, own = engine_with_adapters(script=never), tmp_path / "own"
    run_with([engine], use, predecessors=keeping(own))


def test_a_replica_that_starts_again_gets_all_adapters_before_requests(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        named = [await load(client, f"name-{seed}", files(seed)) for seed in range(3)]
        calls = [asyncio.ensure_future(client.generate([asking(named[0])]))]
        await until(engines[0], lambda engine: bool(engine.requests))
        client.control.adapters.unload("name-0")  # the request still has it
        engines[0].die()
        await until_up(client, 0)
        engines.append(start_again(engines[0]))
        engines[1].script = FakeEngine.script
        await asyncio.gather(*calls)
        assert {digest for _, digest in loads(engines[1])} == {adapter.digest for adapter in named}
        assert engines[1].requests[0].adapter == named[0].digest
        await until(engines[1], lambda engine: has(engine) == {adapter.digest for adapter in named[1:]})

    engines = [engine_with_adapters(script=never)]
    run_with(engines, use, predecessors=keeping(tmp_path / "own"))


def test_what_is_loaded_and_unloaded_while_a_replica_catches_up_reaches_it(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        first = await load(client, "first", files(1))
        engines[1].die()
        await until_up(client, 1)
        loop = asyncio.get_running_loop()
        later: list[NamedAdapter] = []

        async def change() -> None:
            later.append(await load(client, "later", files(2)))
            client.control.adapters.unload("first")
            while first.digest in client.control.adapters._loaded:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        def while_it_is_loaded(command: EngineCommand) -> str:
            if isinstance(command, LoadAdapter) and not later:
                asyncio.run_coroutine_threadsafe(change(), loop).result(20)
            return ""

        again = start_again(engines[1], replica=1)
        again.on_command = while_it_is_loaded
        engines.append(again)
        await until_up(client, 2)
        assert has(again) == has(engines[0]) == {later[0].digest}

    engines = [engine_with_adapters(), engine_with_adapters()]
    run_with(engines, use, predecessors=keeping(tmp_path / "own"))


def test_a_replica_that_refuses_an_adapter_when_it_starts_ends_the_server_with_one_line(
    tmp_path: Path, files: Files
) -> None:
    async def use(client: EngineClient) -> None:
        await load(client, "sql", files(1))
        engines[0].die()
        await until_up(client, 0)
        again = start_again(engines[0])
        again.on_command = refuses_loads
        engines.append(again)
        while not broken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert str(broken[0]) == f"a replica cannot get the adapter 'sql': {files(1)}: no room"

    broken: list[Exception] = []
    engines = [engine_with_adapters()]
    run_with(engines, use, predecessors=keeping(tmp_path / "own"), on_broken=broken.append)


def test_an_engine_that_dies_of_a_load_is_not_given_it_again(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        def die(command: EngineCommand) -> str:
            if isinstance(command, LoadAdapter):
                engines[0]._is_stopping = True
            return ""

        engines[0].on_command = die
        loading = asyncio.ensure_future(load(client, "sql", files(1)))
        await until(engines[0], lambda engine: bool(engine.commands))
        await asyncio.to_thread(engines[0].die)
        with pytest.raises(EngineDied):
            await loading
        engines.append(start_again(engines[0]))
        await until_up(client, 1)
        assert loads(engines[1]) == []
        assert client.control.held == Held()

    engines = [engine_with_adapters()]
    run_with(engines, use, predecessors=keeping(tmp_path / "own"))


def test_a_new_server_has_the_adapters_of_the_one_before_and_clears_what_that_left(
    tmp_path: Path, files: Files
) -> None:
    own, left = tmp_path / "own", digest_of(files(5))
    digest = digest_of(files(1))
    adapter = NamedAdapter("sql", digest, str(own / digest), "where/it/was", f"sql@{digest[:12]}")
    save_adapter(own / digest, 1)
    save_adapter(own / left, 5)
    save_adapter(own / "incoming-7", 6)

    async def use(client: EngineClient) -> None:
        assert client.control.adapters.find("sql") == adapter
        assert loads(engine)[0] == ("load", digest)
        assert ("unload", left) in loads(engine)
        assert has(engine) == {digest}
        assert copies(own) == {digest}
        (finished,) = await client.generate([asking(adapter)])
        assert finished[0].is_finished

    engine = engine_with_adapters()
    run_with([engine], use, predecessors=keeping(own, num_restarts=1, held=Held(adapters=(adapter,))))


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_an_adapter_given_as_new_weights_is_what_later_requests_for_the_model_get(
    tmp_path: Path, files: Files, mode: str
) -> None:
    async def use(client: EngineClient) -> None:
        control = client.control
        call = asyncio.ensure_future(client.generate([make_request("a", [1])]))
        await until(engine, lambda engine: bool(engine.requests))
        updating = asyncio.ensure_future(update(client, files(1), mode))
        if mode == "wait":
            await until(engine, lambda engine: bool(has(engine)))
            await asyncio.sleep(0.02)
            assert not updating.done()
            call.cancel()
        assert await updating == control.weight_version == "1"
        assert not any(isinstance(command, Pause | UpdateWeights) for command in engine.commands)
        assert control.adapters.of_base is not None
        assert control.adapters.of_base.digest == digest_of(files(1))
        if mode == "abort":
            ((aborted,),) = await call
            assert aborted.finish_reason == "abort"
        else:
            assert call.done() == (mode == "wait")
            call.cancel()
            await asyncio.wait([call])
        assert await update(client, files(2)) == "2"
        assert await client.control.update(str(files(2)), "named", clears_cache=True) == "named"
        await until(engine, lambda engine: has(engine) == {digest_of(files(2))})
        with pytest.raises(InvalidRequest, match="no part of the model's weights"):
            await update(client, files(1), is_partial=True)
        assert await update(client, "/weights") == control.weight_version == "named.1"
        assert control.adapters.of_base is None
        await until(engine, lambda engine: has(engine) == set())

    engine = engine_with_adapters(script=never)
    run_with([engine], use, predecessors=keeping(tmp_path / "own"))


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_requests_that_run_with_an_adapter_whose_name_another_gets(tmp_path: Path, files: Files, mode: str) -> None:
    """Those by another name of the same content, and those of the model, go on."""

    async def use(client: EngineClient) -> None:
        before, same = await load(client, "sql", files(1)), await load(client, "same", files(1))
        requests = asking(before, "a"), asking(same, "b"), make_request("c", [1])
        calls = [asyncio.ensure_future(client.generate([request])) for request in requests]
        await until(engine, lambda engine: len(engine.requests) == len(calls))

        def load_again(seed: int) -> asyncio.Future[None]:
            places = {"replaces": True, "mode": mode, "param": "lora_path"}
            return asyncio.ensure_future(client.control.load_adapter("sql", str(files(seed)), **places))  # type: ignore[arg-type]

        await load_again(1)
        assert not any(call.done() for call in calls), "it is the same adapter"
        loading = load_again(2)
        if mode == "wait":
            await until(engine, lambda engine: len(has(engine)) == 2)
            await asyncio.sleep(0.02)
            assert not loading.done()
            calls[0].cancel()
        await loading
        if mode == "abort":
            ((aborted,),) = await calls[0]
            assert aborted.finish_reason == "abort"
        assert [call.done() for call in calls] == [mode != "keep", False, False]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    engine = engine_with_adapters(script=never)
    run_with([engine], use, predecessors=keeping(tmp_path / "own"))


def test_a_refused_adapter_leaves_the_weights_and_their_version(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        await update(client, files(1))
        engine.on_command = refuses_loads
        with pytest.raises(InvalidRequest, match=r"weight_dir: .*: no room"):
            await update(client, files(2))
        assert client.control.weight_version == "1"
        assert client.control.adapters.of_base is not None
        assert client.control.adapters.of_base.digest == digest_of(files(1))

    engine = engine_with_adapters()
    run_with([engine], use, predecessors=keeping(tmp_path / "own"))


def test_two_hundred_loads_leave_what_is_named(tmp_path: Path, files: Files) -> None:
    async def use(client: EngineClient) -> None:
        sources = [files(seed) for seed in range(20)]
        for number in range(200):
            adapter = await load(client, f"name-{number % 3}", sources[number % 20])
            await client.generate([asking(adapter, f"r{number}")])
            if number % 3 == 2:
                client.control.adapters.unload("name-0")
        named = {adapter.digest for adapter in client.control.adapters.named}
        await until(engine, lambda engine: has(engine) == named)
        while copies(own) != named:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert client.control.adapters._loaded.keys() == named

    engine, own = engine_with_adapters(), tmp_path / "own"
    run_with([engine], use, predecessors=keeping(own))
