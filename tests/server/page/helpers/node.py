"""Runs functions of the page's modules in Node, without a browser."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "tokasaurus" / "server" / "page"
# that of the environment, or else of the machine
NODE = shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def in_node(module: str, expression: str, data: object) -> Any:
    """The value of an expression over `data` and the module `m`, as JSON carries it."""
    assert NODE is not None
    script = (
        f'import * as m from "{(PAGE / module).as_uri()}";\n'
        'import { readFileSync } from "node:fs";\n'
        "const data = JSON.parse(readFileSync(0));\n"
        f"console.log(JSON.stringify({expression}));\n"
    )
    command = [NODE, "--input-type=module", "--eval", script]
    done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
