"""What the Dockerfile adds to the image beside packages."""

import subprocess
from pathlib import Path


def make_commands(folder: Path) -> None:
    """Runs what makes commands there, with this folder in place of the image's."""
    text = (Path(__file__).parents[2] / "Dockerfile").read_text().replace("\\\n", "")
    [run] = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ") and "dask-" in line]
    subprocess.run(["sh", "-c", run.replace("/usr/local/bin", str(folder))], check=True)
