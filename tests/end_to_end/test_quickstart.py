"""The README's first program works as printed, and at every address that users write for a server on this machine."""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka

pytestmark = pytest.mark.spawns

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[(), pytest.param(("host=0.0.0.0",), marks=pytest.mark.long)])
def toka(request: pytest.FixtureRequest) -> Iterator[TokaProcess]:
    small = ("kv_cache_num_tokens=20000", "max_tokens_per_forward=256", "max_seqs_per_forward=64")
    with running_toka(*request.param, *small) as process:
        yield process


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_the_quickstart_prints_what_the_readme_says(toka: TokaProcess, address: str) -> None:
    readme = (ROOT / "README.md").read_text()
    program, *_ = re.findall("```python\n(.*?)```", readme, flags=re.DOTALL)
    assert program.count("http://127.0.0.1:10210/v1") == 1
    program = program.replace("http://127.0.0.1:10210/v1", f"http://{address}:{toka.port}/v1")
    with redirect_stdout(StringIO()) as output:
        exec(program, {})
    (expected,) = re.findall(r"print\(.*\)  # (.*)", program)
    assert output.getvalue() == f"{expected}\n"
