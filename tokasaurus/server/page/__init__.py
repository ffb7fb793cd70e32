"""The live page: HTML that is complete in itself, joined from the files of this folder.

Knows: the form of the events of `/live`. Does not know how the server makes them, nor how it serves the page.
"""

import re
from pathlib import Path

_FOLDER = Path(__file__).parent
# Each imports only from those before it.
_SCRIPTS = ("terms.mjs", "samples.mjs", "stream.mjs", "replay.mjs", "charts.mjs", "page.mjs")


def read_live_page() -> bytes:
    """The page as UTF-8, with one style and one script in it."""
    modules = {name: (_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS}
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    page = page.replace("{style}", (_FOLDER / "page.css").read_text(encoding="utf-8"), 1)
    return page.replace("{script}", join_modules(modules), 1).encode()


def join_modules(modules: dict[str, str]) -> str:
    """One JavaScript module of several, by file name; each imports only from earlier ones.

    Their import lines and export words are left out, so the names at the top of all of them must differ.
    `import * as samples` becomes an object of what the module exports.
    """
    joined = []
    exported: dict[str, list[str]] = {}
    for name, text in modules.items():
        for alias, source in re.findall(r'^import \* as (\w+) from "\./(.*)";$', text, flags=re.MULTILINE):
            joined.append(f"const {alias} = {{ {', '.join(exported[source])} }};")
        exported[name] = re.findall(r"^export (?:async )?(?:const|function|class) (\w+)", text, flags=re.MULTILINE)
        text = re.sub(r"^import .*;\n", "", text, flags=re.MULTILINE)
        joined.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(joined)
