"""What is made from code, pages of docs and one module: `make reference` writes it anew, and a test compares it."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.helpers import (
    command_line_page,
    fields_page,
    flags_page,
    http_page,
    keywords_page,
    library_page,
    metrics_page,
)

PAGES: Mapping[Path, Callable[[], str]] = {
    module.PATH: module.page
    for module in (command_line_page, fields_page, flags_page, http_page, keywords_page, library_page, metrics_page)
}
"""Each file → what it has to contain."""

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
