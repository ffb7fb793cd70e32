"""The server of a run without `base_url=`."""

import sys
from pathlib import Path

import pytest

from tokasaurus.commands.batch.errors import CommandError
from tokasaurus.commands.batch.own_server import OwnServer


def test_the_server_imports_no_module_of_the_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("multiprocessing", "orjson", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    server = OwnServer([f"model={tmp_path}"], tmp_path / "run", 0.0, print)
    with pytest.raises(CommandError, match=f"^the server did not start: .*{tmp_path}"), server:
        pass
    assert not Path(server.socket_path).parent.exists()
