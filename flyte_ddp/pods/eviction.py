"""Why Kubernetes evicts a pod: its files exceed its disk limit. The pod gets only SIGTERM, a second before SIGKILL."""

import os
import tempfile
import time
from pathlib import Path

from flyte_ddp.pods.profiles import parse_bytes

LOOK_SECONDS = 0.3  # of the one that an evicted pod has


def eviction_reason(limit: str) -> str:
    """Return a clause to append to an error if this pod's files exceed its disk limit; "" otherwise.

    Adds up the files below the working directory and the temporary folder for up to LOOK_SECONDS. Returns "" if the
    files found by then do not exceed the limit.

    Args:
        limit: The pod's limit of ephemeral storage, as a Kubernetes quantity. Empty if it is not known.
    """
    if not limit or not exceed_disk_limit({Path.cwd(), Path(tempfile.gettempdir())}, parse_bytes(limit)):
        return ""
    return (
        f"; its files take more than its {limit} of disk (ephemeral-storage), so Kubernetes evicts it: take a profile "
        "with more (flyte_ddp/pods/profiles.py)"
    )


def exceed_disk_limit(folders: set[Path], limit: int) -> bool:
    """Return whether the files in the folders take more bytes of disk than the limit; False after LOOK_SECONDS."""
    deadline, taken = time.monotonic() + LOOK_SECONDS, 0
    for folder in folders:
        for place, _, files in os.walk(folder):
            for file in files:
                try:
                    taken += os.lstat(f"{place}/{file}").st_blocks * 512  # st_blocks counts units of 512 bytes
                except FileNotFoundError:  # removed since the folder was listed
                    continue
                if taken > limit:
                    return True
            if time.monotonic() > deadline:
                return False
    return False
