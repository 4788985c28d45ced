"""Mistakes of users that appear while the tasks are imported, or while the command ``flyte`` reads its options."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from flyte_ddp.core.errors import UserError
from flyte_ddp.pods.platforms import is_in_pod


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End the command ``flyte`` after a UserError of the block, and print the error's text.

    The SDK would print two prefixes before the text. In a pod, the error passes unchanged.
    """
    try:
        yield
    except UserError as error:
        if is_in_pod():
            raise
        error.show()
        raise click.exceptions.Exit(error.exit_code) from None
