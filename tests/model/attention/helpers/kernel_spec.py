"""What FlashInfer describes a kernel by, as far as compiling beside a server needs it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass
class KernelSpec:
    directory: Path
    outcome: str
    """What the compiler does: "compiles", "fails" or "hangs"."""
    name: str = "kernel"

    @property
    def lock_path(self) -> Path:
        return self.directory / "lock"

    @property
    def library(self) -> Path:
        return self.directory / "kernel.so"

    @property
    def is_compiled(self) -> bool:
        return self.library.exists()

    def build(self) -> None:
        if self.outcome == "fails":
            raise RuntimeError("Ninja build failed. Ninja output:\nptxas died")
        if self.outcome == "hangs":
            with subprocess.Popen(["sleep", "600"]) as compiler:
                (self.directory / "pid").write_text(str(compiler.pid))
        self.library.touch()

    def build_and_load(self) -> str:
        self.build()
        return "loaded"
