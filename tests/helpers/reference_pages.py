"""The pages of docs that are made from code: `make reference` writes them anew, and a test compares them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.helpers import command_line_page, fields_page, flags_page, http_page, library_page, metrics_page

PAGES: Mapping[Path, Callable[[], str]] = {
    module.PATH: module.page
    for module in (command_line_page, fields_page, flags_page, http_page, library_page, metrics_page)
}
"""Each page → what it has to contain."""

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
