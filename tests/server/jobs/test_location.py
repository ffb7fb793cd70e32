"""Where the store is, and which directories end the start in one line."""

import time
from pathlib import Path

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import live_server
from tests.server.jobs.helpers.batch_service import input_lines
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import UserError
from tokasaurus.server.jobs.store.data_dir import DataDirInUse
from tokasaurus.server.jobs.store.store import default_data_dir, open_store, opened_data_dir
from tokasaurus.server.served_model import ServedModel

URL = "http://127.0.0.1:10210"


def config_with(data_dir: Path | None, port: int = 10210) -> ServerConfig:
    config = ServerConfig()
    config.data_dir = None if data_dir is None else str(data_dir)
    config.port = port
    return config


@pytest.fixture
def default_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    return tmp_path / "share" / "tokasaurus" / "port-10210"


def damage(root: Path) -> bytes:
    """The damaged database's content."""
    with open_store(root, ""):
        pass
    database = root / "database.sqlite"
    database.write_bytes(database.read_bytes()[:5000])
    return database.read_bytes()


def test_the_flag_names_the_directory(tmp_path: Path) -> None:
    with opened_data_dir(config_with(tmp_path / "data"), URL) as store:
        assert store is not None
        assert store.data_dir.root == tmp_path / "data"
        assert store.data_dir.read_owner() == URL


def test_each_port_has_a_default(default_dir: Path) -> None:
    with opened_data_dir(config_with(None), URL) as store:
        assert store is not None
        assert store.data_dir.root == default_dir == default_data_dir(10210)


def test_the_default_directory_is_made_with_the_first_file_and_found_by_the_next_server(
    served_model: ServedModel, default_dir: Path
) -> None:
    file = {"file": ("in.jsonl", input_lines({"prompt": "a"}))}
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = ""
    for is_first in (True, False):
        with opened_data_dir(config_with(None), URL) as store:
            assert default_dir.exists() is not is_first
            with live_server(served_model, FakeEngine(), store=store) as server:
                listed = [one["id"] for one in server.http.get("/v1/batches").json()["data"]]
                assert listed == ([] if is_first else [batch_id])
                for path in ("files/file-1", "batches/batch_1"):
                    assert server.http.get(f"/v1/{path}").status_code == 404
                assert server.http.delete("/v1/files/file-1").status_code == 404
                assert server.http.post("/v1/batches", json={**body, "input_file_id": "file-1"}).status_code == 404
                if not is_first:
                    break
                refused = server.http.post("/v1/files", files=file, data={"purpose": "assistants"})
                assert refused.status_code == 400
                uploaded = server.http.post("/v1/files", files=file, data={"purpose": "batch"}).json()["id"]
                assert default_dir.exists()
                created = server.http.post("/v1/batches", json={**body, "input_file_id": uploaded}).json()
                batch_id = created["id"]
                assert server.http.get(f"/v1/files/{uploaded}/content").content == file["file"][1]
                deadline_s = time.monotonic() + 60
                while server.http.get(f"/v1/batches/{batch_id}").json()["status"] != "completed":
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
                with pytest.raises(DataDirInUse, match=URL), open_store(default_dir, ""):
                    pass


def test_a_port_that_the_system_chooses_and_a_unix_socket_have_none(default_dir: Path) -> None:
    with opened_data_dir(config_with(None, port=0), URL) as store:
        assert store is None
    config = config_with(None)
    config.unix_socket = "/run/toka"
    with opened_data_dir(config, "unix:/run/toka") as store:
        assert store is None
    assert not default_dir.parent.exists()


def test_a_damaged_database_ends_the_start_in_one_line_and_is_left(tmp_path: Path) -> None:
    content = damage(tmp_path)
    with pytest.raises(UserError) as error, opened_data_dir(config_with(tmp_path), URL):
        pass
    line = str(error.value)
    assert line.startswith(f"data_dir={tmp_path}: the database {tmp_path}/database.sqlite is damaged (")
    assert line.endswith("); nothing was changed in it")
    assert "\n" not in line
    assert (tmp_path / "database.sqlite").read_bytes() == content


def test_a_damaged_database_in_the_default_directory_is_no_warning(default_dir: Path) -> None:
    content = damage(default_dir)
    opening = opened_data_dir(config_with(None), URL)
    with pytest.raises(UserError, match=r"is damaged.*set data_dir= to use another"), opening:
        pass
    assert (default_dir / "database.sqlite").read_bytes() == content


def test_a_directory_in_use_ends_the_start(tmp_path: Path) -> None:
    with open_store(tmp_path, "http://first:1"):
        second = opened_data_dir(config_with(tmp_path), URL)
        with pytest.raises(UserError, match=r"in use by another server \(http://first:1\)"), second:
            pass


def test_the_default_directory_in_use_is_a_warning(default_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(default_dir, "http://first:1"), opened_data_dir(config_with(None), URL) as store:
        assert store is None
    assert "in use by another server" in caplog.text


@pytest.mark.parametrize("is_default", [True, False])
def test_a_directory_that_cannot_be_made(default_dir: Path, caplog: pytest.LogCaptureFixture, is_default: bool) -> None:
    default_dir.parent.parent.mkdir()
    default_dir.parent.write_text("a file")
    if is_default:
        with opened_data_dir(config_with(None), URL) as store:
            assert store is None
        assert "no files and batches" in caplog.text
    else:
        named = opened_data_dir(config_with(default_dir), URL)
        with pytest.raises(UserError, match="cannot use"), named:
            pass
