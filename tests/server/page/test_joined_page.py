"""The page is joined from its files into one that needs no other."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.server.page.helpers.node import NODE, PAGE, in_node
from tokasaurus.server.page import join_modules, read_live_page


def test_the_page_has_one_style_and_one_script_and_names_no_other_address() -> None:
    page = read_live_page().decode()
    assert (page.count("<style>"), page.count("<script")) == (1, 1)
    assert not re.search(r"\{(style|script)\}", page)
    # namespaces of SVG are names, never fetched
    assert set(re.findall(r"https?://[^\s\"'`)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"""\s(?:src|href)=["']?([^"'\s>]+)""", page) == ["data:image/svg+xml,%3Csvg", "#main", "metrics"]


@pytest.mark.skipif(NODE is None, reason="needs Node")
def test_words_are_explained_as_in_the_glossary() -> None:
    terms = in_node("terms.mjs", "m.TERMS", None)
    rows = re.findall(r"^- ([^:*]+): (.+)$", (PAGE.parents[2] / "docs" / "architecture.md").read_text(), re.M)
    assert {word: meaning for word, meaning in terms.items() if (word, meaning) not in rows} == {}
    explained = re.findall(r'data-terms="([^"]+)"', read_live_page().decode())
    assert {word for words in explained for word in words.split(", ")} == {*terms}


def test_every_file_of_the_folder_is_in_the_page() -> None:
    page = read_live_page().decode()
    sources = [path for path in PAGE.iterdir() if path.suffix in (".mjs", ".css")]
    assert len(sources) >= 2
    for path in sources:
        lines = [
            line.removeprefix("export ") for line in path.read_text().splitlines() if not line.startswith("import ")
        ]
        assert "\n".join(lines).strip() in page, path.name


def test_joined_modules_run_like_the_modules() -> None:
    modules = {
        "a.mjs": "// one\nexport const X = 1;\nexport function f() {\n  return X;\n}\n",
        "b.mjs": 'import { X } from "./a.mjs";\nimport * as a from "./a.mjs";\nexport class B {}\nsay(X, a.f());\n',
    }
    assert join_modules(modules) == (
        "// one\nconst X = 1;\nfunction f() {\n  return X;\n}\n\nconst a = { X, f };\nclass B {}\nsay(X, a.f());\n"
    )


@pytest.mark.skipif(NODE is None, reason="needs Node")
def test_the_joined_script_has_no_name_twice(tmp_path: Path) -> None:
    page = read_live_page().decode()
    script = page.partition('<script type="module">')[2].partition("</script>")[0]
    path = tmp_path / "page.mjs"
    path.write_text(script)
    assert NODE is not None
    done = subprocess.run([NODE, "--check", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^(import|export) ", script, flags=re.MULTILINE)
