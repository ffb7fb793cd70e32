"""Server flags: values that are read, values that are refused, and the one-line reasons."""

import inspect
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagError

ROOT = Path(__file__).parents[1]


def refusal(*args: str) -> str:
    with pytest.raises(FlagError) as caught:
        ServerConfig.parse(list(args))
    return str(caught.value)


def commands_in_docs() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    return [line for line in lines if re.match(r"toka( [a-z_]+=|$| +#)", line)]


@pytest.mark.parametrize("command", commands_in_docs())
def test_every_command_in_the_docs_is_understood(command: str) -> None:
    ServerConfig.parse(shlex.split(command, comments=True)[1:])


def test_every_field_is_a_flag_and_in_the_help_once() -> None:
    fields = list(inspect.get_annotations(ServerConfig))
    assert list(ServerConfig.flags) == fields
    assert vars(ServerConfig()).keys() - {"_annotations_initialized"} == set(fields)
    for width in (80, 140):
        lines = ServerConfig.help_text(width).splitlines()
        assert max(map(len, lines)) <= width
        for name in fields:
            (line,) = [line for line in lines if line.startswith((f"  {name}=", f"  {name} ("))]
            default = getattr(ServerConfig, name)
            if default is not None:
                shown = {True: "T", False: "F"}[default] if isinstance(default, bool) else str(default)
                assert line.split()[0] == f"{name}={shown}"


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("port=80", "port", 80),
        ("port=0", "port", 0),
        ("max_tokens_per_forward='(2 * 1024)'", "max_tokens_per_forward", 2048),
        ("kv_cache_num_tokens=1e5", "kv_cache_num_tokens", 100_000),
        ("kv_cache_size_num_tokens=64", "kv_cache_num_tokens", 64),
        ("kv_cache_num_tokens=auto", "kv_cache_num_tokens", None),
        ("stats_report_seconds=3", "stats_report_seconds", 3.0),
        ("track_early_stopping=F", "track_early_stopping", False),
        ("track_early_stopping=false", "track_early_stopping", False),
        ("track_early_stopping=True", "track_early_stopping", True),
        ("device=cpu", "device", "cpu"),
        ("device=auto", "device", None),
        ("device=None", "device", None),
        ("cpu_isa=avx512_bf16", "cpu_isa", "avx512_bf16"),
        ("cpu_isa=auto", "cpu_isa", None),
        ("attention_backend=reference", "attention_backend", "reference"),
        ("tool_call_format=llama3", "tool_call_format", "llama3"),
        ("tool_call_format=auto", "tool_call_format", None),
        ("greedy_prefill=F", "greedy_prefill", False),
        ("max_batch_lines=1", "max_batch_lines", 1),
        ("early_stopping_init_mean=1", "early_stopping_init_mean", 1.0),
        ("price_per_hour=0", "price_per_hour", 0.0),
        ("early_stopping_init_mean=0.01", "early_stopping_init_mean", 0.01),
        # Text values are kept as typed.
        ("model=meta-llama/Llama-3.2-1B", "model", "meta-llama/Llama-3.2-1B"),
        ("model=1e5", "model", "1e5"),
        ("model=T", "model", "T"),
        ("model=(a)", "model", "(a)"),
        ("model=a=b", "model", "a=b"),
        ('served_model_name="two words"', "served_model_name", "two words"),
        ("rope_scaling=None", "rope_scaling", None),
        ('rope_scaling={"rope_type":"linear","factor":2.0}', "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ('rope_scaling={"truncate":false}', "rope_scaling", {"truncate": False}),
        ("use_cudagraphs=F", "use_cudagraphs", False),
    ],
)
def test_value_is_read(word: str, name: str, value: object) -> None:
    # A shell takes the outer quotes away.
    config = ServerConfig.parse([word.replace("'", "")])
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    untouched = {key: default for key, default in vars(ServerConfig()).items() if key != name}
    assert {key: setting for key, setting in vars(config).items() if key != name} == untouched


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("port=8080.7", "port=8080.7: must be a whole number from 0 to 65535"),
        ("port=http", "port=http: must be a whole number from 0 to 65535"),
        ("port=70000", "port=70000: must be a whole number from 0 to 65535"),
        ("port=T", "port=T: must be a whole number from 0 to 65535"),
        ("port=", "port=: must be a whole number from 0 to 65535"),
        ("port=None", "port=None: must be a whole number from 0 to 65535"),
        ("page_size=0", "page_size=0: must be a whole number from 1 to 2147483647"),
        ("page_size=[1,a]", "page_size=[1,a]: cannot be read, ValueError: Couldn't parse collection: '[1,a]'"),
        ("page_size=(1/0)", "page_size=(1/0): cannot be read, ZeroDivisionError: division by zero"),
        (
            "kv_cache_num_tokens=some",
            "kv_cache_num_tokens=some: must be a whole number from 1 to 2147483647, or None (auto)",
        ),
        (
            "kv_cache_num_tokens=31 page_size=32",
            "kv_cache_num_tokens=31: must be at least one page of page_size=32 tokens",
        ),
        ("stats_report_seconds=1e999", "stats_report_seconds=1e999: must be a number from 0.1 to 86400"),
        ("stats_report_seconds=0", "stats_report_seconds=0: must be a number from 0.1 to 86400"),
        ("track_early_stopping=1", "track_early_stopping=1: must be T or F"),
        ("track_early_stopping=auto", "track_early_stopping=auto: must be T or F"),
        ("device=tpu", "device=tpu: must be cpu or cuda, or None (auto)"),
        (
            "cpu_isa=sse2",
            "cpu_isa=sse2: must be avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx, neon or torch, "
            "or None (auto)",
        ),
        ("dtype=int8", "dtype=int8: must be bfloat16, float16 or float32, or None (auto)"),
        (
            "attention_backend=flash",
            "attention_backend=flash: must be torch, cpu, flashinfer or reference, or None (auto)",
        ),
        ("attention_backend=flashinfer device=cpu", "attention_backend=flashinfer: does not run with device=cpu"),
        ("attention_backend=flashinfer dtype=float32", "attention_backend=flashinfer: does not run with dtype=float32"),
        ("log_level=loud", "log_level=loud: must be error, warning, info or debug"),
        ("model=", "model=: must be some text, or None (demo)"),
        ("host=", "host=: must be some text"),
        ("tool_call_format=T", "tool_call_format=T: must be hermes, mistral, mistral_args, "),
        (
            "early_stopping_init_mean=1.1",
            "early_stopping_init_mean=1.1: must be a number from 0 to 1, or None (none)",
        ),
        ("price_per_hour=-0.1", "price_per_hour=-0.1: must be a number of at least 0, or None"),
        ("trace_steps=0", "trace_steps=0: must be a whole number from 1 to 2147483647"),
        ("trace_first_step=-1", "trace_first_step=-1: must be a whole number from 0 to 2147483647"),
        ("prot=80", "prot=80: unknown flag, did you mean port=?"),
        ("zzz=1", "zzz=1: unknown flag, --help-all lists those there are"),
        ("port.x=1", "port.x=1: unknown flag, did you mean port=?"),
        ("finalize=1", "finalize=1: unknown flag"),
        ("port", "port: not understood, flags are written name=value"),
        (".finalize", ".finalize: not understood, flags are written name=value"),
        ("async_tp_threshold=0", "async_tp_threshold=0: must be a whole number from 1 to 2147483647, or None (off)"),
        ("async_tp_threshold=9 torch_compile=T", "async_tp_threshold=9: needs tp_size= of at least 2 beside it"),
        ("async_tp_threshold=9 tp_size=2", "async_tp_threshold=9: needs torch_compile=T beside it, since"),
        (
            "async_tp_threshold=9 tp_size=2 torch_compile=T max_tokens_per_forward=8",
            "async_tp_threshold=9: must be at most max_tokens_per_forward=8",
        ),
        ("symmetric_all_reduce=T", "symmetric_all_reduce=T: needs tp_size= of at least 2 beside it"),
        ("statsd_server_url=udp://x", "statsd_server_url=udp://x: must be HOST:PORT"),
        ("statsd_server_url=x:0", "statsd_server_url=x:0: must be HOST:PORT"),
        ("statsd_server_url=x:65536", "statsd_server_url=x:65536: must be HOST:PORT"),
        ("statsd_server_url=http://x:80", "statsd_server_url=http://x:80: must be HOST:PORT"),
        ("statsd_server_url=[::1:80", "statsd_server_url=[::1:80: must be HOST:PORT"),
        ("rope_scaling=yarn", "rope_scaling=yarn: must be a JSON object, or None (model's)"),
        ("rope_scaling=[1]", "rope_scaling=[1]: must be a JSON object, or None (model's)"),
        ("rope_scaling={'factor':{2}}", "rope_scaling={'factor':{2}}: cannot be read, TypeError: Object of type set"),
        ("rope_scaling={(1,2):3}", "rope_scaling={(1,2):3}: cannot be read, TypeError: keys must be str"),
    ],
)
def test_wrong_flag_is_one_line_with_name_value_and_what_is_allowed(words: str, message: str) -> None:
    line = refusal(*words.split())
    assert line.startswith(message)
    assert "\n" not in line


def test_dropped_flags_are_accepted_with_a_warning_and_change_nothing() -> None:
    words = [f"{name}=7" for name in ServerConfig.retired]
    with pytest.warns(UserWarning, match="does nothing") as warned:
        config = ServerConfig.parse([*words, "port=80"])
    assert vars(config) == vars(ServerConfig.parse(["port=80"]))
    assert [str(one.message) for one in warned] == [
        f"{name}=7: does nothing, {now}" for name, now in ServerConfig.retired.items()
    ]
    assert not set(ServerConfig.retired) & set(ServerConfig.names())


def test_refusal_of_a_value_with_several_lines_is_one_line() -> None:
    assert refusal("port=a\nb\x07") == r"port='a\nb\x07': must be a whole number from 0 to 65535"


def test_config_made_in_python_is_checked_too() -> None:
    config = ServerConfig()
    config.port = 8080.7  # type: ignore[assignment]
    with pytest.raises(FlagError, match=r"^port=8080.7: "):
        config.finalize()


def test_a_program_that_makes_a_config_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_API_KEY", "from-outside")
    monkeypatch.setenv("TOKA_PORT", "1")
    assert vars(ServerConfig.parse([])) == vars(ServerConfig())
    assert ServerConfig.parse(["port=1", "port=2"]).port == 2, "the last word counts"


@pytest.mark.parametrize("key", ["two words", "schlüssel", " padded", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    assert refusal(f"api_key={key}") == "api_key: must be printable ASCII without spaces, as a header carries it"


def test_all_wrong_flags_are_told_in_their_order() -> None:
    words = ["prot=1", "port=x", "api_kye=secret", "page_size=32", "kv_cache_num_tokens=31", "device=tpu", "x"]
    assert refusal(*words).splitlines() == [
        "prot=1: unknown flag, did you mean port=?",
        "api_kye: unknown flag, did you mean api_key=?",
        "x: not understood, flags are written name=value",
        "port=x: must be a whole number from 0 to 65535",
        "kv_cache_num_tokens=31: must be at least one page of page_size=32 tokens",
        "device=tpu: must be cpu or cuda, or None (auto)",
    ]


def test_a_rule_is_not_judged_by_another_flags_wrong_value() -> None:
    assert refusal("page_size=x", "kv_cache_num_tokens=64") == (
        "page_size=x: must be a whole number from 1 to 2147483647"
    )


def test_config_crosses_to_another_process() -> None:
    config = ServerConfig.parse(["port=80", "served_model_name=x"])
    script = "import pickle, sys; c = pickle.load(sys.stdin.buffer); print(c.port, c.served_model_name, c.page_size)"
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(config), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["80", "x", "16"]


@pytest.mark.parametrize("error", [None, ModuleNotFoundError])
def test_traces_without_their_packages_say_what_to_install(
    error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(_name: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("tokasaurus.flags.find_spec", find)
    expected = (
        "otel_endpoint=http://localhost:4318: needs packages that are not installed: "
        "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    )
    assert refusal("otel_endpoint=http://localhost:4318") == expected
    monkeypatch.setattr("tokasaurus.flags.find_spec", lambda name: name)
    assert ServerConfig.parse(["otel_endpoint=http://localhost:4318"]).otel_endpoint == "http://localhost:4318"
    assert refusal("otel_endpoint=localhost").startswith("otel_endpoint=localhost: must be a URL such as")
