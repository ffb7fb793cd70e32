"""What results look like on a screen, in a notebook and in other libraries; no server."""

import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from pydantic import BaseModel

from tokasaurus import (
    AsyncLLM,
    MapSummary,
    Result,
    Results,
    RowError,
    RowsFailed,
    Sample,
    Sampling,
    Score,
    ToolCall,
)

SEED = 2**63 + 1
"""No float is this number."""


class City(BaseModel):
    name: str


@dataclasses.dataclass
class Place:
    name: str


def sample(text: str = "Berlin", **fields: Any) -> Sample:
    arrays = {"token_ids": np.array([1, 2], np.int32), "logprobs": np.array([-0.5, -1], np.float32)}
    return Sample(**{"text": text, "finish_reason": "stop", "seed": SEED, **arrays, **fields})


LONG = "a\nb<b>&\"'" * 5000
ERROR = RowError("context_length_exceeded", LONG, "prompt", 400)
RESULTS = Results(
    [
        Result(0, "Where?", (sample(), sample("Rome", index=1, prompt_tokens=3))),
        Result(1, LONG, (), ERROR),
        *(Result(number, [1, 2], (sample(LONG),)) for number in range(2, 40)),
    ]
)


@pytest.mark.parametrize(
    "value",
    [
        RESULTS,
        *RESULTS[:3],
        Result(LONG, LONG, (sample(LONG),)),
        sample(LONG),
        ERROR,
        ToolCall("a", "f", LONG),
        Score(np.zeros(9999, np.int32), np.zeros(9999, np.float32)),
        Score(np.zeros(0, np.int32), np.zeros(0, np.float32), ERROR),
        MapSummary(9, 1, 2, 3, 4, 5.0, Path("out"), (LONG,) * 10),
        Sampling(n=8, stop=["\n"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_is_shown_in_one_short_line(value: object) -> None:
    shown = repr(value)
    assert "\n" not in shown
    assert len(shown) < 400
    assert shown.startswith(type(value).__name__)


def test_what_the_line_says() -> None:
    assert repr(RESULTS[0]) == "Result(0, 'Berlin', 2 samples)"
    assert repr(Results([RESULTS[0]])) == "Results([Result(0, 'Berlin', 2 samples)])"
    assert repr(RESULTS).endswith(", … 37 more])")
    assert repr(RESULTS[1]).startswith("Result(1, RowError(context_length_exceeded, 'a\\nb<b>&")
    assert repr(sample()) == "Sample('Berlin', stop, 2 tokens)"
    assert repr(Sampling()) == "Sampling()"
    assert repr(Sampling(n=8, stop="a", temperature=0)) == "Sampling(n=8, temperature=0, stop='a')"
    assert repr(AsyncLLM("some/model", dp_size=2)) == "AsyncLLM(some/model)"
    assert repr(AsyncLLM()) == "AsyncLLM(demo)"
    summary = MapSummary(2000, 100, 3, 7, 160_000, 12.34, Path("out"))
    assert repr(summary) == "MapSummary(2,000 rows in out, 100 skipped, 3 errors, 160,000 tokens in 12.3 s)"


def test_a_notebook_shows_a_table_whose_texts_are_no_html() -> None:
    hostile = "<script>alert(1)</script>&\"'"
    html = Results([Result(hostile, hostile, (sample(hostile, finish_reason=hostile),))])._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") == 4
    failed = Result("<b>", [{"role": "user", "content": "<i>"}], (), RowError("bad", "<u>"))._repr_html_()
    assert [f"&lt;{tag}&gt;" in failed for tag in "biu"] == [True] * 3
    assert not any(f"<{tag}>" in failed for tag in "biu")


def test_a_table_has_a_row_for_each_sample_and_an_end() -> None:
    assert RESULTS[0]._repr_html_().count("<tr>") == 1 + 2
    html = RESULTS._repr_html_()
    assert html.count("<tr>") == 1 + 20
    assert html.endswith("<p>21 more</p>")
    assert len(html) < 40_000
    assert "more" not in Results(RESULTS[:2])._repr_html_()


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("a text", "a text"),
        ([{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}], "Hi"),
        ({"id": 3, "prompt": "p"}, "p"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "Hi"),
        ([1, 2], "[1, 2]"),
        (None, "None"),
        ([], "[]"),
    ],
)
def test_the_prompt_in_a_table(row: object, shown: str) -> None:
    assert f">{shown}</td>" in Result(0, row, (sample(),))._repr_html_()


def test_a_dictionary_is_what_json_can_write() -> None:
    calls = (ToolCall("1", "f", "{}"),)
    tops = {"top_token_ids": np.array([[1], [2]], np.int32), "top_logprobs": np.array([[-1], [-2]], np.float32)}
    full = sample(parsed=City(name="Rome"), tool_calls=calls, **tops)
    row = {"id": np.int64(7), "prompt": np.array([1, 2])}
    written = Result(np.int64(7), row, (full, sample(parsed=Place("Rome")), sample(parsed={"a": [1]}))).to_dict()
    assert json.loads(json.dumps(written)) == written
    assert (written["key"], written["row"], written["error"]) == (7, {"id": 7, "prompt": [1, 2]}, None)
    first, second, third = written["samples"]
    assert set(first) == {field.name for field in dataclasses.fields(Sample)}
    assert (first["token_ids"], first["logprobs"], first["seed"]) == ([1, 2], [-0.5, -1.0], SEED)
    assert (first["top_token_ids"], first["top_logprobs"]) == ([[1], [2]], [[-1.0], [-2.0]])
    assert first["tool_calls"] == [{"id": "1", "name": "f", "arguments": "{}"}]
    assert [one["parsed"] for one in (first, second, third)] == [{"name": "Rome"}, {"name": "Rome"}, {"a": [1]}]
    failed = Result(0, "a", (), ERROR).to_dict()
    assert failed["error"] == {"code": ERROR.code, "message": LONG, "param": "prompt", "status": 400}
    assert Score(np.array([3], np.int32), np.array([-0.5], np.float32)).to_dict() == {
        **{"token_ids": [3], "logprobs": [-0.5], "error": None}
    }


def test_a_frame_has_a_row_for_each_sample_and_error_and_every_field() -> None:
    frame = RESULTS.to_pandas()
    assert [*frame.columns] == ["key", "row", *(field.name for field in dataclasses.fields(Sample)), "error"]
    assert len(frame) == 2 + 1 + 38
    assert frame["text"][:3].tolist() == ["Berlin", "Rome", None]
    assert frame["key"].tolist() == [0, 0, 1, *range(2, 40)]
    assert frame["seed"].dropna().unique().tolist() == [SEED]
    assert frame["index"][:2].tolist() == [0, 1]
    assert frame["index"].isna().tolist()[:3] == [False, False, True]
    assert frame["error"][:3].tolist() == [None, None, LONG]
    assert frame["token_ids"][0].tolist() == [1, 2]
    assert frame["row"][3] == [1, 2]
    assert Results().to_pandas().empty
    assert isinstance(frame, pandas.DataFrame)


def test_without_pandas_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"^to_pandas needs pandas: pip install pandas$"):
        RESULTS.to_pandas()


def test_results_travel_between_processes() -> None:
    """Also in 3.10, whose frozen dataclasses with slots need more to do so."""
    failed = RowsFailed("1 of 2 prompts failed", Results(RESULTS[:2]))
    copy = pickle.loads(pickle.dumps(failed))
    assert (str(copy), type(copy.results), copy.results[0].text) == (str(failed), Results, "Berlin")
