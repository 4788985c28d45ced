"""Commands that the Dockerfile adds to the image."""

import subprocess
from pathlib import Path


def make_commands(folder: Path) -> None:
    """Run the Dockerfile's RUN line that creates Dask's commands, with ``folder`` in place of /usr/local/bin."""
    text = (Path(__file__).parents[2] / "Dockerfile").read_text().replace("\\\n", "")
    [run] = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ") and "dask-" in line]
    subprocess.run(["sh", "-c", run.replace("/usr/local/bin", str(folder))], check=True)
