"""Flyte as the platform that runs tasks: an implementation of flyte_ddp.pods.platforms.Platform."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from flytekit import Deck, FlyteContextManager
from flytekit.configuration import LocalConfig
from flytekit.core.context_manager import ExecutionState
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

from flyte_ddp.core.errors import UserError
from flyte_ddp.pods.platforms import EXECUTION_ID, is_in_pod


def remove_execution_id_outside_tasks() -> None:
    """Remove FLYTE_INTERNAL_EXECUTION_ID from the environment, unless Flyte executes a task in this process.

    Therefore ``pyflyte run`` and notebooks that a user starts inside a pod, such as a workspace, are local runs.
    """
    state = FlyteContextManager.current_context().execution_state
    if state is None or state.mode is not ExecutionState.Mode.TASK_EXECUTION:
        os.environ.pop(EXECUTION_ID, None)


class Flyte:
    """Facts about the current Flyte task, and access to Flyte's decks and retryable errors."""

    retraining_request = "--overwrite-cache"

    def is_retraining_requested(self) -> bool:
        cache = LocalConfig.auto()
        return bool(cache.cache_overwrite or not cache.cache_enabled)

    def output_address(self) -> str:
        return str(FlyteContextManager.current_context().file_access.raw_output_prefix)

    def publish_page(self, title: str, html: str) -> None:
        """Add a page to the task's decks, and in a pod publish the decks. If the task has no decks, do nothing."""
        context = FlyteContextManager.current_context()
        if not context.user_space_params.enable_deck:
            return
        replace_deck(title, html)
        if not is_in_pod():
            return
        # flytekit publishes no deck of a dynamic task, so every task is presented as an ordinary one.
        state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        with FlyteContextManager.with_context(context.with_execution_state(state)):
            Deck.publish()

    def retryable_error(self, message: str) -> Exception:
        return FlyteRecoverableException(message)


def replace_deck(title: str, html: str) -> None:
    """Add a deck to the current task. If the task has a deck of this title, replace the deck."""
    decks = FlyteContextManager.current_context().user_space_params.decks
    new = Deck(title, html, auto_add_to_deck=False)
    decks[:] = [new if deck.name == title else deck for deck in decks]
    if new not in decks:
        decks.append(new)


PLATFORM = Flyte()


def translate_errors_for_flyte() -> AbstractContextManager[None]:
    from flyte_ddp.pods.retries import raise_retryable_errors

    return raise_retryable_errors(PLATFORM)  # Flyte retries only after FlyteRecoverableException


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Raise a UserError of the block as FlyteUserRuntimeException. The block is a task's ``dispatch_execute``.

    The UserError may be the cause or context of flytekit's system error. Without this, flytekit reports any error
    before the body, such as a failed conversion of an input, as a system error.
    """
    try:
        yield
    except FlyteNonRecoverableSystemException as error:
        mistake = error.value  # flytekit may have wrapped the UserError
        while mistake is not None and not isinstance(mistake, UserError):
            mistake = mistake.__cause__ or mistake.__context__
        if mistake is None:
            raise
        raise FlyteUserRuntimeException(mistake) from mistake
