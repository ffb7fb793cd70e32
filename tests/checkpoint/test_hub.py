"""Models from a hub. Each case has its own process, since huggingface_hub reads its environment at import."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers.fake_hub import COMMIT, CONFIG, TOKENIZER, FakeHub, serve_repository, weights
from tests.helpers.damage import DAMAGE
from tests.helpers.examples import few

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"]
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": TOKENIZER.encode(),
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(),
    SHARDS[0]: weights("model.embed_tokens.weight", "lm_head.weight"),
    SHARDS[1]: weights(*(f"model.layers.0.{name}.weight" for name in PROJECTIONS)),
    "pytorch_model.bin": b"the same weights again",
    "consolidated.safetensors": b"and again",
    "original/params.json": b"{}",
    "README.md": b"words",
}
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
WANTED = {"config.json", "tokenizer.json", *TEMPLATES, "model.safetensors.index.json", *SHARDS}

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint
try:
    checkpoint = resolve_checkpoint(sys.argv[1])
    print(checkpoint.name, checkpoint.directory, checkpoint.tokenizer_directory, sep="\\n")
except CheckpointError as error:
    print("refused:" if error.exit_code == 2 else "unavailable:", error)
assert "torch" not in sys.modules
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_repository("org/tiny", FILES) as running:
        yield running


def resolve(name: str, tmp_path: Path, endpoint: str, **environment: str) -> list[str]:
    """Lines that the script prints."""
    own: dict[str, Any] = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), **environment}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], env={**inherited, **own}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_repository_is_downloaded_once_and_served_offline(tmp_path: Path, hub: FakeHub) -> None:
    name, directory, tokenizer_directory = first = resolve("org/tiny", tmp_path, hub.url)
    assert name == "org/tiny"
    assert Path(directory).name == COMMIT
    assert json.loads((Path(tokenizer_directory) / "tokenizer.json").read_text())["model"]["vocab"] == {"a": 0, "b": 1}
    paths = [path for path in Path(directory).rglob("*") if path.is_file()]
    found = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    assert found == {key: FILES[key] for key in WANTED}
    assert sorted(hub.downloaded) == sorted(WANTED)

    assert resolve("org/tiny", tmp_path, hub.url) == first
    assert resolve("org/tiny", tmp_path, hub.url, HF_HUB_OFFLINE="1") == first
    assert sorted(hub.downloaded) == sorted(WANTED), "a second look downloads nothing"


def test_only_the_single_file_is_downloaded_where_there_are_both(tmp_path: Path) -> None:
    files = {**FILES, "model.safetensors": weights()}
    with serve_repository("org/tiny", files) as hub:
        _, directory, _ = resolve("org/tiny", tmp_path, hub.url)
        assert resolve("org/tiny", tmp_path, hub.url, HF_HUB_OFFLINE="1")[1] == directory
    assert sorted(hub.downloaded) == sorted((WANTED - set(SHARDS)) | {"model.safetensors"})


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(tmp_path: Path) -> None:
    files = {**FILES, "config.json": json.dumps({**CONFIG, "model_type": "mamba"}).encode()}
    with serve_repository("org/tiny", files) as hub:
        lines = resolve("org/tiny", tmp_path, hub.url)
    assert len(lines) == 1
    assert "model_type 'mamba' is not supported" in lines[0]
    assert not set(SHARDS) & set(hub.downloaded)


def test_each_failure_gives_one_line(tmp_path: Path, hub: FakeHub) -> None:
    (absent,) = resolve("org/absent", tmp_path, hub.url)
    assert absent == (
        f"refused: org/absent is neither a directory here nor a repository at {hub.url} that HF_TOKEN may read"
    )
    (offline,) = resolve("org/tiny", tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert offline.startswith("unavailable: org/tiny is not completely in the cache")
    assert offline.endswith("HF_HUB_OFFLINE is set")
    (unreachable,) = resolve("org/tiny", tmp_path, "http://127.0.0.1:9")
    assert unreachable.startswith("unavailable: ")
    assert "http://127.0.0.1:9 does not answer" in unreachable
    hub.gated = True
    (gated,) = resolve("org/tiny", tmp_path, hub.url)
    assert gated.startswith("refused: org/tiny is gated: accept its terms at")


@few(1, "kind", ["cut", "empty"])
def test_a_file_of_the_wrong_size_is_downloaded_again(kind: str, tmp_path: Path, hub: FakeHub) -> None:
    _, directory, _ = resolve("org/tiny", tmp_path, hub.url)
    path = Path(directory, SHARDS[1])
    DAMAGE[kind](path)
    (offline,) = resolve("org/tiny", tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert f"{SHARDS[1]} of org/tiny has {path.stat().st_size} bytes instead of {len(FILES[SHARDS[1]])}" in offline
    hub.downloaded.clear()
    assert resolve("org/tiny", tmp_path, hub.url)[:2] == ["org/tiny", directory]
    assert path.read_bytes() == FILES[SHARDS[1]]
    assert hub.downloaded == [SHARDS[1]]


@few(1, "proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "nonsense://"])
def test_a_hub_on_this_machine_is_reached_without_a_proxy(tmp_path: Path, hub: FakeHub, proxy: str) -> None:
    proxies = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "all_proxy"), proxy)
    assert resolve("org/tiny", tmp_path, hub.url, **proxies)[0] == "org/tiny"
    (line,) = resolve("org/tiny", tmp_path / "other", "http://192.0.2.1", **proxies)
    assert line.startswith("unavailable: ")
    assert ("environment variable http_proxy: " in line) != proxy.startswith("http:")


def test_without_a_home_the_hub_has_its_cache_in_ours(tmp_path: Path, hub: FakeHub) -> None:
    script = tmp_path / "sitecustomize.py"
    script.write_text("import pwd\ndef no_entry(user): raise KeyError(user)\npwd.getpwuid = no_entry\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path), "HF_ENDPOINT": hub.url}
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "org/tiny"],
        env={**inherited, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    name, directory, _ = done.stdout.splitlines()
    assert name == "org/tiny"
    assert Path(directory).is_relative_to(tmp_path / f"tokasaurus-{os.getuid()}" / "huggingface")
    assert not (tmp_path / "~").exists()


def test_a_repository_of_an_adapter_is_refused_before_its_weights_are_downloaded(tmp_path: Path) -> None:
    adapter = {
        "adapter_config.json": b'{"base_model_name_or_path": "org/base"}',
        "adapter_model.safetensors": weights(),
    }
    with serve_repository("org/adapter", adapter) as hub:
        (line,) = resolve("org/adapter", tmp_path, hub.url)
        assert line.startswith("refused: ")
        assert "is an adapter for 'org/base', not a model" in line
        assert hub.downloaded == ["adapter_config.json"]
