"""compose.yaml against its schema, the files that it mounts, and Prometheus with its configuration."""

import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.helpers.files import DEPLOY, END_S, PORT, ROOT, read_yaml, unknown_flags
from tests.deploy.helpers.play import started
from tests.end_to_end.helpers.toka_process import free_port, running_toka, wait_for
from tests.helpers.tiny_model import save_tiny_model

SERVICES = read_yaml("compose.yaml")["services"]
KEY = "secret-of-the-test"


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed")
def test_compose_accepts_the_file() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_resolves_the_file(tmp_path: Path) -> None:
    """Version 1 of the command, the only one that Debian has, does not know `name`."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "deploy" / "api_key").write_text("a")
    path = tmp_path / "deploy" / "compose.yaml"
    path.write_text(path.read_text().replace("name: tokasaurus\n", "", 1))
    done = subprocess.run(["docker-compose", "-f", str(path), "config"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    resolved = yaml.safe_load(done.stdout)["services"]
    assert resolved.keys() == SERVICES.keys()
    assert resolved["toka"]["build"]["context"] == str(tmp_path)


def mounts(service: str) -> dict[str, str]:
    """By target: the volume, or the path of the file from deploy/ on."""
    pairs = [mount.split(":") for mount in SERVICES[service]["volumes"]]
    return {target: source for source, target, *_ in pairs}


def test_mounted_files_and_volumes_exist() -> None:
    compose = read_yaml("compose.yaml")
    for service in SERVICES:
        for source in mounts(service).values():
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in compose["volumes"], source
    build = SERVICES["toka"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    # The key is the user's own file.
    assert compose["secrets"]["api_key"]["file"] == "./api_key"
    assert "/deploy/api_key" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_server_has_flags_that_exist_and_time_to_drain() -> None:
    flags = dict(word.split("=", 1) for word in SERVICES["toka"]["command"])
    variables = [name for name in SERVICES["toka"]["environment"] if name.startswith("TOKA_")]
    assert unknown_flags([*flags, *variables]) == set()
    assert SERVICES["toka"]["stop_grace_period"] == f"{int(flags['drain_seconds']) + END_S}s"
    assert flags["api_keys_file"] == "/run/secrets/api_key"
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_prometheus_asks_the_server_with_the_key_and_has_the_alert_rules() -> None:
    config = read_yaml("prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "toka"
    assert job["static_configs"] == [{"targets": [f"toka:{PORT}"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/api_key"
    assert "api_key" in SERVICES["prometheus"]["secrets"]
    mounted = mounts("prometheus")
    assert mounted["/etc/prometheus/prometheus.yml"] == "./prometheus.yml"
    assert [mounted[f"/etc/prometheus/{name}"] for name in config["rule_files"]] == ["./alerts.yml"]


def test_grafana_finds_the_data_source_and_the_dashboard() -> None:
    mounted = mounts("grafana")
    directory = "/etc/grafana/provisioning"
    assert mounted[f"{directory}/datasources/tokasaurus.yml"] == "./grafana/datasources.yml"
    assert mounted[f"{directory}/dashboards/tokasaurus.yml"] == "./grafana/dashboards.yml"
    (source,) = read_yaml("grafana/datasources.yml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = read_yaml("grafana/dashboards.yml")["providers"]
    assert mounted[f"{provider['options']['path']}/tokasaurus.json"] == "./grafana.json"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_promtool_accepts_prometheus_files() -> None:
    # Without the file of the key, and the other containers' names
    command = ["promtool", "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_scrapes_a_server_that_wants_the_key(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    key_file = tmp_path / "api_key"
    key_file.write_text(f"{KEY}\n")  # as a shell writes it
    with running_toka(f"model={tmp_path / 'model'}", f"api_keys_file={key_file}", "kv_cache_num_tokens=4096") as toka:
        assert httpx.get(f"{toka.url}/metrics", timeout=60).status_code == 401
        text = (DEPLOY / "prometheus.yml").read_text().replace("15s", "500ms")
        text = text.replace("/run/secrets/api_key", str(key_file)).replace(f"toka:{PORT}", f"127.0.0.1:{toka.port}")
        (tmp_path / "prometheus.yml").write_text(text)
        shutil.copy(DEPLOY / "alerts.yml", tmp_path)
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        with started([*command, f"--web.listen-address={address}"], {}):

            def ask(path: str) -> dict[str, object]:
                try:
                    found: dict[str, object] = httpx.get(f"http://{address}/api/v1/{path}", timeout=10).json()["data"]
                except (httpx.TransportError, ValueError, KeyError):
                    return {}
                return found

            wait_for(lambda: bool(ask("query?query=up{job='toka'}==1").get("result")), 60)
            assert ask("query?query=toka_kv_blocks").get("result")
            deadline_s = time.monotonic() + 30
            while not (groups := ask("rules").get("groups")):
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            assert isinstance(groups, list)
            assert [rule["health"] for rule in groups[0]["rules"]].count("err") == 0
