"""The interface to the platform that runs tasks, such as Flyte.

A front end implements ``Platform``, as flytekitplugins/ddp/flyte.py does. Other facts come from environment variables
of a pod, which Flyte 1 and Flyte 2 set alike.
"""

import getpass
import os
import re
import socket
import tempfile
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Protocol

EXECUTION_ID = "FLYTE_INTERNAL_EXECUTION_ID"
NO_SCHEDULE = datetime(1970, 1, 1, tzinfo=UTC)  # kickoff time of an execution that no schedule started


class Platform(Protocol):
    """Facts about the current task, and methods to publish a page and to make a retryable error."""

    retraining_request: str  # what a user of a local run adds to a command to train again

    def is_retraining_requested(self) -> bool:
        """Return whether the user of a local run wants to train again although the run has a result."""

    def output_address(self) -> str:
        """Return the address in the blob store below which this attempt writes outputs. Only for pods."""

    def publish_page(self, title: str, html: str) -> None:
        """Upload an HTML page for the console. Replaces this task's page of the same title."""

    def retryable_error(self, message: str) -> Exception:
        """Return the exception that makes the platform start another attempt when a task raises it."""


def is_in_pod() -> bool:
    """Return whether this process, or an ancestor, executes a task for a platform.

    False for a user's process inside a pod: flytekitplugins/ddp/flyte.py removes the variable EXECUTION_ID there.
    """
    return EXECUTION_ID in os.environ


@cache
def get_pod_folder() -> Path:
    """Return the temporary folder for files of this pod's task. The first call in a process makes the folder."""
    return Path(tempfile.mkdtemp(prefix="flyte-ddp-"))


def read_execution_names() -> tuple[str, str, str]:
    """Return the project, the domain and the id of this pod's execution."""
    project, domain = (os.environ[f"FLYTE_INTERNAL_EXECUTION_{part}"] for part in ("PROJECT", "DOMAIN"))
    return project, domain, os.environ[EXECUTION_ID]


def convert_to_storage_address(address: str) -> str:
    """Return a platform's address in the form of flyte_ddp.storage: az:// for abfs:// and abfss:// of Azure."""
    return re.sub(r"^abfss?://([^/@]+)(@[^/]*)?", r"az://\1", address)


def describe_author() -> str:
    """Return the author of a change, for a log: PROJECT/DOMAIN/EXECUTION in a pod, USER@HOST elsewhere."""
    if is_in_pod():
        return "/".join(read_execution_names())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, whose user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
