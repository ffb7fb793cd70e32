"""docs/flags.md, made from the declarations in tokasaurus/config.py."""

from pathlib import Path

from tokasaurus.config import ServerConfig
from tokasaurus.flags import MAX_INT32, Flag, allowed_values

PATH = Path(__file__).parents[2] / "docs" / "flags.md"

INTRODUCTION = """\
# Flags of `toka`

`make reference` makes this page from `tokasaurus/config.py`, where every flag is declared; a test compares the two.

Flags are written `name=value`: `T` and `F` are true and false, `None` is none or auto, `'(2 * 1024)'` is evaluated.
Flags that are wrong in name, type or range end the command with a line for each and exit code 2. Every flag is also an
environment variable, such as `TOKA_PORT` for `port`, and an entry of a YAML file: see
[the command line](command_line.md). `toka --help-all` prints these tables, and `toka ping --help-all` the flags of
`toka ping`; the same goes for every command.
"""
HEAD = ["| flag | default | values | meaning |", "|---|---|---|---|"]
RETIRED = """\
## Flags of earlier releases

These are accepted with a warning, and do nothing.
"""
HEAD_OF_RETIRED = ["| flag | what holds |", "|---|---|"]


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    heading = ""
    for name, flag in ServerConfig.flags.items():
        if flag.heading != heading:
            heading = flag.heading
            lines += [
                "",
                f"## {heading.capitalize()}",
                "",
                "| flag | default | values | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(_row(name, flag))
    lines += ["", RETIRED, *HEAD_OF_RETIRED]
    lines += [f"| `{name}` | {now} |" for name, now in ServerConfig.retired.items()]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _row(name: str, flag: Flag) -> str:
    shown = {None: flag.none_means, True: "T", False: "F"}
    default = shown[flag.default] if flag.default is None or isinstance(flag.default, bool) else f"`{flag.default}`"
    values = allowed_values(flag).removesuffix(f", or None ({flag.none_means})").removesuffix(f" to {MAX_INT32}")
    names = f"`{name}`" + (f", also `{flag.alias}`" if flag.alias else "")
    values = "; ".join([values, *(rule.text for rule in flag.rules)])
    return f"| {names} | {default} | {values} | {flag.meaning} |".replace("*", "\\*")
