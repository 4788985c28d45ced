"""Why Kubernetes evicts a pod: its files take more than its limit. The pod is told only to stop, a second before."""

import os
import sys
import tempfile
import time
from pathlib import Path

from tasks import pods

LOOK_SECONDS = 0.3  # of the one that an evicted pod has


def eviction_reason() -> str:
    """Return why Kubernetes is evicting this pod, to be put after an error; "" if the pod's disk is not the reason.

    Looks at the files below the working directory and the temporary folder, for LOOK_SECONDS at most: if the limit has
    not been reached by then, it returns "" too. In pods of Ray, Dask and Elastic, which are made by others, it does not
    look.
    """
    module, _, name = os.environ.get("FLYTE_INTERNAL_TASK_NAME", "").rpartition(".")
    task = getattr(sys.modules.get(module), name, None)
    if task is None or task.task_type != "python-task":
        return ""
    limit = task.resources.limits.ephemeral_storage
    if not exceeds(pods.in_bytes(limit), {Path.cwd(), Path(tempfile.gettempdir())}):
        return ""
    return (
        f"; its files take more than its {limit} of disk (ephemeral-storage), so Kubernetes evicts it: take a profile "
        "with more (tasks/pods.py)"
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
