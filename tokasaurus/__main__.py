"""The entry of `toka` and `python -m tokasaurus`: imports the commands. A Ctrl-C meanwhile ends in one line too."""

import os
import sys


def main() -> int:
    """Run tokasaurus.cli.main; returns the exit code. Ctrl-C while it is imported ends with one line and 130."""
    try:
        from tokasaurus.inherited import put_right

        put_right()
        from tokasaurus.cli import main as run
    except KeyboardInterrupt:
        os.write(2, b"stopped\n")
        return 130
    return run()


if __name__ == "__main__":
    # Unless it has this package, the working directory comes last: it may have modules with the names of Python's.
    if not getattr(sys.flags, "safe_path", False) and not __file__.startswith(f"{sys.path[0]}/tokasaurus/"):
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
