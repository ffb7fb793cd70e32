"""What a program inherits from whoever started it, put right: streams, signals, the encoding of paths, and the working
directory, whose modules are none of Python's.

Imports little: it runs before all else.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def put_right() -> None:
    """Opens standard streams that are closed, unblocks signals, and has paths read as UTF-8: in a new interpreter, if
    this one does not. Call it first in a program's main thread."""
    _read_paths_as_utf8()
    _open_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGCHLD):  # which some supervisors ignore
        signal.signal(number, signal.SIG_DFL)


def _read_paths_as_utf8() -> None:
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Else a file or a socket gets the number of a stream, and what is meant for the user."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)


NO_DIRECTORY = "the working directory is deleted: change to another one"

_PACKAGE_PARENT = str(Path(__file__).absolute().parents[1])


def module_paths() -> list[str]:
    """sys.path for another interpreter: the working directory, and the directory of this program's script, come last
    unless they have this package, since they may have modules with the names of others."""
    directory = working_directory()
    of_script = str(Path(directory or "/", sys.argv[0]).parent)
    own = {"", directory, of_script} - {_PACKAGE_PARENT}
    paths = [path for path in sys.path if isinstance(path, str)]
    return [*(path for path in paths if path not in own), *(path for path in paths if path in own)]


def working_directory() -> str | None:
    """None if it is deleted."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


def python_command(statement: str) -> list[str]:
    """The command line of an interpreter that runs a statement and finds the modules that this one finds: with -m or -c
    alone, modules of the working directory would come first."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {module_paths()!r}; {statement}"]


def module_command(module: str) -> list[str]:
    """As `python -m`."""
    return python_command(f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")


@contextmanager
def among_pythons_modules() -> Iterator[str | None]:
    """Within the context, the working directory is that of Python's own modules: an interpreter that is started there
    imports no module of the user's directory. Yields the directory from before; None if it is deleted."""
    before = working_directory()
    try:
        descriptor = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    except OSError:  # an interpreter can read no module there either
        yield before
        return
    try:
        os.chdir(Path(os.__file__).parent)
        yield before
    finally:
        os.fchdir(descriptor)
        os.close(descriptor)
