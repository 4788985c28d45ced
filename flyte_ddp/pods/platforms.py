"""The interface to a platform that runs tasks, such as Flyte; tasks/flyte.py has its one implementation."""

import getpass
import os
import socket
from pathlib import Path
from typing import Protocol


class Platform(Protocol):
    """Facts about the task that runs now, and the platform's ways to take over a file, a page and an error."""

    def is_local(self) -> bool:
        """Return whether the task runs in a process that a person has started, and not in a pod."""

    def pod_folder(self) -> Path:
        """Return the folder of this pod's task, in which its files go. Only for pods."""

    def disk_limit(self) -> str:
        """Return this pod's limit of ephemeral storage as a Kubernetes quantity; empty if it is not known."""

    def is_retraining_requested(self) -> bool:
        """Return whether this local command is to train even if the run's result is there."""

    def output_address(self) -> str:
        """Return the address in the blob store below which this attempt writes its outputs. Only for pods."""

    def read_secret(self, group: str, key: str) -> str | None:
        """Return a secret that this pod was started with; None if the platform has none of that name."""

    def upload_folder(self, folder: Path, address: str) -> None:
        """Upload a folder to an address in the blob store; raise any error of the store's client."""

    def publish_page(self, title: str, html: str) -> None:
        """Upload an HTML page for the console, in place of this task's page of the same title."""

    def retryable_error(self, message: str) -> Exception:
        """Return the exception that makes the platform start another attempt when a task raises it."""


def execution_names() -> tuple[str, str, str]:
    """Return the project, the domain and the id of the execution to which this pod belongs, from its environment."""
    project, domain, name = (os.environ[f"FLYTE_INTERNAL_EXECUTION_{part}"] for part in ("PROJECT", "DOMAIN", "ID"))
    return project, domain, name


def launcher_name(platform: Platform) -> str:
    """Return whom to name as the author of a change: the execution in a pod, else this machine's user."""
    if not platform.is_local():
        return "/".join(execution_names())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, whose user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
