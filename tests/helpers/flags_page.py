"""docs/flags.md, made from the declarations in tokasaurus/config.py."""

from pathlib import Path

from tokasaurus.config import ServerConfig
from tokasaurus.flags import MAX_INT32, Flag, allowed_values

PATH = Path(__file__).parents[2] / "docs" / "flags.md"

INTRODUCTION = """\
# Flags of `toka`

`make reference` makes this page from `tokasaurus/config.py`, where every flag is declared; a test compares the two.

Flags are written `name=value`: `T` and `F` are true and false, `None` is none or auto, `'(2 * 1024)'` is evaluated.
Every flag is also an environment variable, such as `TOKA_PORT`, and an entry of a YAML file: see
[the command line](command_line.md). `toka --help-all` prints this list; the same goes for every command.

A flag is `name` = default (other values): meaning. Numbers without a range are whole and from 1.
"""
RETIRED = """\
## Flags of earlier releases

These are accepted with a warning that says what holds now, and do nothing:
"""


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    heading = ""
    for name, flag in ServerConfig.flags.items():
        if flag.heading != heading:
            heading = flag.heading
            lines += ["", f"## {heading.capitalize()}", ""]
        lines.append(_line(name, flag))
    lines += ["", RETIRED, ", ".join(f"`{name}`" for name in ServerConfig.retired) + "."]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _line(name: str, flag: Flag) -> str:
    shown = {None: flag.none_means, True: "T", False: "F"}
    default = shown[flag.default] if flag.default is None or isinstance(flag.default, bool) else f"`{flag.default}`"
    values = allowed_values(flag).removesuffix(f", or None ({flag.none_means})").removesuffix(f" to {MAX_INT32}")
    is_plain = values in ("some text", "a whole number from 1") or isinstance(flag.default, bool)
    values = "; ".join([*([] if is_plain else [values]), *(rule.text for rule in flag.rules)])
    names = f"`{name}`" + (f", `{flag.alias}`" if flag.alias else "")
    return f"- {names} = {default}{f' ({values})' if values else ''}: {flag.meaning}".replace("*", "\\*")
