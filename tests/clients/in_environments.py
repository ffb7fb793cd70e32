"""Tests a real server with clients that conflict with the test environment: `make test-clients`.

Makes an environment in .venv-clients for each set of compatible clients, starts the server that they need, and runs the
clients' tests in their environments. Most share one with the demo model in float32; those that train have a tiny model.
`make test-clients CLIENTS=lm-eval` tests only that set. `make test-clients-newest` takes the newest version of every
package, whatever the requirements say. With --record, versions and day of the sets that pass are written into the docs.

Packages are installed by `uv` where it is found on the path, else by pip, which takes minutes where uv takes seconds.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tests.clients.environments import ENVIRONMENTS, Environment, Served
from tests.clients.table import RECORDS, Record, read_records, write_table

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".venv-clients"
TEST_SECONDS = 1800
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100")
_VERSIONS = (
    "import importlib.metadata as m, json, sys; "
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
)


@dataclass(frozen=True)
class Installed:
    """One set of clients, as it is to be installed."""

    environment: Environment
    is_newest: bool

    @property
    def directory(self) -> Path:
        return (DIRECTORY / "newest" if self.is_newest else DIRECTORY) / self.environment.name

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def requirements(self) -> tuple[str, ...]:
        if not self.is_newest:
            return self.environment.requirements
        return tuple(re.split(r"[<>=~!]", text, maxsplit=1)[0] for text in self.environment.requirements)

    @property
    def npm_packages(self) -> tuple[str, ...]:
        if not self.is_newest:
            return self.environment.npm_packages
        return tuple(f"{text.rpartition('@')[0]}@latest" for text in self.environment.npm_packages)

    def versions(self) -> dict[str, str]:
        """Of each of the environment's clients."""
        done = subprocess.run([self.python, "-c", _VERSIONS], check=True, capture_output=True, text=True)
        python: dict[str, str] = json.loads(done.stdout)
        node = {text.rpartition("@")[0] for text in self.npm_packages}
        return {
            package: self._node_version(package) if package in node else python[package]
            for package in self.environment.clients
        }

    def _node_version(self, package: str) -> str:
        version: str = json.loads((self.directory / "node_modules" / package / "package.json").read_text())["version"]
        return version


def say(line: str) -> None:
    print(f"\n== {line}", flush=True)


def install(clients: Installed) -> None:
    """Does nothing if the same requirements are installed already. Raises CalledProcessError if pip or npm fails."""
    installed = clients.directory / "installed"
    wanted = "\n".join((*clients.requirements, *TEST_TOOLS))
    all_wanted = wanted + "".join(f"\n{package}" for package in clients.npm_packages)
    if installed.is_file() and installed.read_text() == all_wanted:
        return
    say(f"{clients.environment.name}: installing {', '.join((*clients.requirements, *clients.npm_packages))}")
    uv = shutil.which("uv")
    venv.create(clients.directory, clear=True, with_pip=uv is None)
    installer = (
        [clients.python, "-m", "pip", "install"]
        if uv is None
        else [uv, "pip", "install", "-q", "--python", clients.python]
    )
    subprocess.run([*installer, *wanted.split("\n")], check=True)
    if clients.npm_packages:
        npm = clients.python.with_name("npm")
        subprocess.run([npm, "install", "--prefix", clients.directory, *clients.npm_packages], check=True)
    installed.write_text(all_wanted)


def run_tests(clients: Installed, served: Served) -> bool:
    say(f"{clients.environment.name}: {', '.join(clients.environment.tests)}")
    variables = {"TOKA_CLIENTS_BASE_URL": f"{served.url}/v1", "TOKA_CLIENTS_MODEL": str(served.model)}
    variables |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    files = [f"tests/clients/{name}" for name in clients.environment.tests]
    command = [
        clients.python,
        "-m",
        "pytest",
        "-v",
        "-rs",
        "--disable-warnings",
        "--capture=sys",
        "-p",
        "no:cacheprovider",
        "--confcutdir=tests/clients",  # the conftest.py above needs torch
        *("-m", ""),  # the long tests too
        *files,
    ]
    try:
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, timeout=TEST_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:  # a client that waits for ever, such as a trainer whose sampling process has died
        say(f"the tests did not end within {TEST_SECONDS} s")
        return False


def record(clients: Installed) -> None:
    """Into the records and the docs."""
    entry: Record = {"day": datetime.now(timezone.utc).date().isoformat(), "versions": clients.versions()}
    records = {**read_records(), clients.environment.name: entry}
    known = [environment.name for environment in ENVIRONMENTS]
    kept = {name: records[name] for name in sorted(records) if name in known}
    RECORDS.write_text(json.dumps(kept, indent=2) + "\n")
    write_table()


def run(chosen: Sequence[Installed], records: bool) -> int:
    """The exit code: 1 if an installation or a client's tests failed. At the end a line for each set says which."""
    results = {}
    ready = []
    for clients in chosen:
        try:
            install(clients)
            ready.append(clients)
        except subprocess.CalledProcessError:
            results[clients.environment.name] = "COULD NOT BE INSTALLED"
    for server in dict.fromkeys(clients.environment.server for clients in ready):
        say("starting a server")
        with server() as served:
            for clients in ready:
                if clients.environment.server is not server:
                    continue
                has_passed = run_tests(clients, served)
                versions = ", ".join(f"{package} {version}" for package, version in clients.versions().items())
                results[clients.environment.name] = f"{'passed' if has_passed else 'FAILED'} ({versions})"
                if has_passed and records:
                    record(clients)
    for name, result in results.items():
        say(f"{name}: {result}")
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


def main(arguments: Sequence[str]) -> int:
    """The exit code: that of `run`, or 2 if a name is unknown."""
    parser = argparse.ArgumentParser(prog="make test-clients")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(arguments)
    known = {environment.name: environment for environment in ENVIRONMENTS}
    if unknown := set(options.names) - set(known):
        print(f"no such clients: {', '.join(sorted(unknown))}; known clients: {', '.join(known)}", file=sys.stderr)
        return 2
    if options.newest and options.record:
        parser.error("--record is for the versions of the requirements")
    chosen = [Installed(known[name], options.newest) for name in options.names or known]
    return run(chosen, options.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
