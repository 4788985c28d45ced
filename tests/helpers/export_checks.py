"""Ask an exported model as a program without torch does."""

import os
import subprocess
import sys
from pathlib import Path


def check_without_torch(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run serve_check.py in a process that has no torch."""
    blocked = folder / "blocked/torch"
    blocked.mkdir(parents=True, exist_ok=True)
    (blocked / "__init__.py").write_text("raise ImportError('no torch here')")
    command = [sys.executable, str(folder / "serve_check.py")]
    environment = {**os.environ, "PYTHONPATH": str(blocked.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
