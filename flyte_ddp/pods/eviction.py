"""Why Kubernetes evicts a pod: its files take more than its limit. The pod is told only to stop, a second before."""

import os
import tempfile
import time
from pathlib import Path

from flyte_ddp.pods.profiles import parse_bytes

LOOK_SECONDS = 0.3  # of the one that an evicted pod has


def eviction_reason(limit: str) -> str:
    """Return why Kubernetes is evicting this pod, to be put after an error; "" if the pod's disk is not the reason.

    Looks at the files below the working directory and the temporary folder, for LOOK_SECONDS at most: if the limit has
    not been reached by then, it returns "" too.

    Args:
        limit: The pod's limit of ephemeral storage, as a quantity. Empty if it is not known.
    """
    if not limit or not exceeds(parse_bytes(limit), {Path.cwd(), Path(tempfile.gettempdir())}):
        return ""
    return (
        f"; its files take more than its {limit} of disk (ephemeral-storage), so Kubernetes evicts it: take a profile "
        "with more (flyte_ddp/pods/profiles.py)"
    )


def exceeds(limit: int, folders: set[Path]) -> bool:
    """Return whether the files in the folders take more bytes of disk than the limit; False after LOOK_SECONDS."""
    deadline, taken = time.monotonic() + LOOK_SECONDS, 0
    for folder in folders:
        for place, _, files in os.walk(folder):
            for file in files:
                try:
                    taken += os.lstat(f"{place}/{file}").st_blocks * 512
                except FileNotFoundError:  # removed meanwhile
                    continue
                if taken > limit:
                    return True
            if time.monotonic() > deadline:
                return False
    return False
