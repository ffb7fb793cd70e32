"""The systemd unit and the Kubernetes manifest, played with a real server: the same commands, variables, requests and
signals, with a tiny model, and probes that come more often."""

import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.helpers.files import (
    DEPLOY,
    END_S,
    PORT,
    image_environment,
    read_dockerfile,
    read_manifest,
    read_unit,
    read_yaml,
    unknown_flags,
)
from tests.deploy.helpers.play import Probes, Stream, started
from tests.end_to_end.helpers.toka_process import free_port, not_ready, wait_for
from tests.helpers.processes import assert_all_end

TOKA = [sys.executable, "-m", "tokasaurus"]
SMALL = {"dtype": "float32", "kv_cache_num_tokens": 4096, "max_tokens_per_forward": 256, "max_seqs_per_forward": 16}
START_S = 120
KEY = "secret-of-the-test"


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.TransportError:
        return 0


def children(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listing.stdout.split()]


def health_check(words: list[str], port: int) -> int:
    """The exit code of a health check of an image, which names the default port or TOKA_PORT."""
    replaced = [word.replace(f":{PORT}/", f":{port}/") for word in words]
    return subprocess.run(replaced, env={"PATH": "/usr/bin:/bin", "TOKA_PORT": str(port)}, timeout=30).returncode


@pytest.mark.long
def test_the_unit_drains_running_streams(model: Path, tmp_path: Path) -> None:
    unit = read_unit(DEPLOY / "toka.service")
    environment = dict(word.split("=", 1) for line in unit["Environment"] for word in line.split())
    assert unknown_flags([name for name in environment if name.startswith("TOKA_")]) == set()
    del environment["HOME"]  # with the compiled kernels of this machine
    environment["TOKA_DATA_DIR"] = str(tmp_path / "data")
    # As lines of /etc/tokasaurus/environment
    port = free_port()
    environment |= {f"TOKA_{name.upper()}": str(value) for name, value in SMALL.items()}
    environment |= {"TOKA_MODEL": str(model), "TOKA_PORT": str(port)}
    (command,) = unit["ExecStart"]
    program, *flags = shlex.split(command)
    assert program.endswith("/bin/toka")
    (drain_s,) = [int(flag.partition("=")[2]) for flag in flags if flag.startswith("drain_seconds=")]
    (limit_s,) = map(int, unit["TimeoutStopSec"])
    assert limit_s == drain_s + END_S
    url = f"http://127.0.0.1:{port}"
    with started([*TOKA, *flags], environment) as process:
        wait_for(lambda: status(f"{url}/ready") == 200, START_S)
        stream = Stream(url, {})
        reader = stream.start()
        others = children(process.pid)
        assert len(others) >= 3  # the server, the manager, the worker, and what Python starts
        # mixed: the signal goes to the main process alone, unlike by default, when all processes get it
        assert (unit["KillMode"], unit["KillSignal"]) == (["mixed"], ["SIGTERM"])
        assert "ExecStop" not in unit
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: status(f"{url}/ready") == 503, 10)
        assert not stream.is_done
        assert process.wait(timeout=limit_s) == 0
        reader.join(timeout=10)
        stream.assert_whole()
        assert_all_end(others, within_s=0.5)  # none is left for SIGKILL


def test_the_unit_does_not_restart_after_a_wrong_model(tmp_path: Path) -> None:
    unit = read_unit(DEPLOY / "toka.service")
    with started(TOKA, {"TOKA_MODEL": str(tmp_path / "absent"), "TOKA_PORT": str(free_port())}) as process:
        assert [str(process.wait(timeout=60))] == unit["RestartPreventExitStatus"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """Every key and value; the program must exist, so that another one takes its place."""
    (command,) = read_unit(DEPLOY / "toka.service")["ExecStart"]
    text = (DEPLOY / "toka.service").read_text().replace(command.split()[0], sys.executable)
    path = tmp_path / "toka.service"
    path.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "toka.service" in line]) == (0, [])


@pytest.mark.long
def test_the_manifest_starts_probes_and_drains(model: Path, tmp_path: Path) -> None:
    objects = read_manifest()
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = yaml.safe_load(objects["ConfigMap"]["data"]["config.yaml"])
    assert unknown_flags(list(flags)) == set()
    pre_stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pre_stop[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] == int(pre_stop[1]) + flags["drain_seconds"] + END_S

    port = free_port()
    flags |= SMALL | {"model": str(model), "port": port}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(flags))
    arguments = [word.replace("/etc/tokasaurus", str(tmp_path)) for word in container["args"]]
    assert [variable["name"] for variable in container["env"]] == ["TOKA_API_KEY"]
    dockerfile = read_dockerfile(DEPLOY / "Dockerfile")
    environment = image_environment(dockerfile)
    assert unknown_flags([name for name in environment if name.startswith("TOKA_")]) == set()
    del environment["HOME"]  # with the compiled kernels of this machine
    environment |= {"TOKA_DATA_DIR": str(tmp_path / "data"), "TOKA_API_KEY": KEY}
    (check,) = [one.text.removeprefix("CMD ") for one in dockerfile if one.name == "HEALTHCHECK"]
    image_check = yaml.safe_load(check)
    compose_check = read_yaml("compose.yaml")["services"]["toka"]["healthcheck"]["test"][1:]

    url = f"http://127.0.0.1:{port}"
    probes = Probes(container, url, period_s=0.1)
    body = {"model": "default", "prompt": "A", "max_tokens": 2}
    authorized = {"Authorization": f"Bearer {KEY}"}
    assert health_check(image_check, port) != 0
    with started([*TOKA, *arguments], environment) as process:
        with not_ready(process.pid):  # alive, but the model is not loaded
            wait_for(lambda: probes.ask("livenessProbe").is_success, START_S)
            assert not probes.ask("startupProbe").is_success
            assert not probes.ask("readinessProbe").is_success
        probes.wait_for_start(START_S)
        assert health_check(image_check, port) == 0
        assert health_check(compose_check, port) == 0

        with probes.running():
            begun_s = time.monotonic()
            stream = Stream(url, authorized)
            reader = stream.start()
            subprocess.run(["sleep", "0.5"], check=True)  # preStop, in short
            assert httpx.post(f"{url}/v1/completions", json=body, headers=authorized).status_code == 200
            signalled_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: status(f"{url}/ready") == 503, 10)
            refusing_s = time.monotonic()
            assert httpx.post(f"{url}/v1/completions", json=body, headers=authorized).status_code == 503
            assert not stream.is_done
            assert process.wait(timeout=pod["terminationGracePeriodSeconds"] - int(pre_stop[1])) == 0
            reader.join(timeout=10)
        stream.assert_whole()
        assert stream.ended_s is not None
        alive = probes.between("livenessProbe", begun_s, stream.ended_s)
        assert len(alive) >= 5
        assert all(alive)
        before = probes.between("readinessProbe", begun_s, signalled_s)
        after = probes.between("readinessProbe", refusing_s, stream.ended_s)
        assert before
        assert all(before)
        assert after
        assert not any(after)
