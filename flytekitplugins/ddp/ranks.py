"""Send a task's body to the ranks, run the body in flytekit's context, and return the results."""

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flytekit
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.deck.deck import TimeLineDeck
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.literals import LiteralMap

from flyte_ddp.calls import compute_code_digest_and_modules, get_function_name, pickle_for_ranks
from flyte_ddp.core.errors import UnreachableError
from flyte_ddp.core.loops.call import Call
from flytekitplugins.ddp.inputs import share_downloads
from flytekitplugins.ddp.outputs import convert_outputs, refuse_unwritable_types


@dataclass(frozen=True)
class Returned:
    """The value that the body has returned on rank 0, and the decks of rank 0 as name and HTML."""

    value: Any  # a LiteralMap if ``literals`` was requested
    decks: list[tuple[str, str]]


class FunctionOfTask:
    """Pickled as the address of a task, and unpickled as the task's function."""

    def __init__(self, module: str, name: str) -> None:
        path = Path(str(sys.modules[module].__file__))
        root = path.parents[module.count(".") + (path.name == "__init__.py")]
        self.address = module, name, str(root)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, str]]:
        return import_task_function, self.address


def import_task_function(module: str, name: str, root: str) -> Any:
    """Import a task's module, and return the task's function. Puts the folder ``root`` first on ``sys.path``."""
    if root not in sys.path:  # pyflyte has the folder there only during imports
        sys.path.insert(0, root)
    return getattr(importlib.import_module(module), name).task_function


def make_call(task: Any, inputs: Mapping[str, Any], shown: Mapping[str, Any], raw_output: str, literals: bool) -> Call:
    """Return the Call by which each rank calls :func:`run_body` with a task's function and inputs.

    The function is sent by name if its module has the task under this name, else by value. Puts the working directory
    first on ``sys.path``.

    Args:
        task: The flytekit task.
        inputs: Arguments of the task's function.
        shown: The inputs as JSON values, which identify the run.
        raw_output: Prefix for files of a pod. "" in a local run.
        literals: Whether rank 0 uploads the values and returns their literals.

    Raises:
        UserError: A declared output type cannot be serialized, the inputs cannot be pickled, or a module has changed.
    """
    function = task.task_function
    code, user_code = compute_code_digest_and_modules(function)
    module, name = function.__module__, function.__name__
    is_found = module != "__main__" and getattr(sys.modules.get(module), name, None) is task
    sent = FunctionOfTask(module, name) if is_found else function
    outputs = task.python_interface.outputs, task.python_interface.output_tuple_name
    refuse_unwritable_types(outputs[0])
    payload = pickle_for_ranks(task.name, run_body, sent, dict(inputs), raw_output, outputs, literals)
    return Call(get_function_name(function), payload, shown, code, user_code)


def run_body(
    function: Callable[..., Any],
    inputs: dict[str, Any],
    raw_output: str,
    outputs: tuple[dict[str, type], str | None],
    literals: bool,
) -> Returned | None:
    """Call a task's function in this rank, in flytekit's context. Rank 0 returns the results, and other ranks None.

    Args:
        function: The task's function.
        inputs: Arguments of the function.
        raw_output: Prefix for files of a pod. "" in a local run.
        outputs: Declared types by name, and the name of a declared NamedTuple.
        literals: Whether to upload the values and return their literals.

    Raises:
        UnreachableError: The function raised Flyte's recoverable exception.
    """
    from flytekit.bin.entrypoint import setup_execution

    from flyte_ddp.core.loops.current_rank import current_rank  # imports torch

    rank = current_rank().rank
    share_downloads(inputs)
    with setup_execution(raw_output) if raw_output else nullcontext():
        try:
            value = function(**inputs)
        except FlyteRecoverableException as error:
            traceback.print_exc()
            raise UnreachableError(f"rank {rank}: {type(error).__name__}: {error}") from error
        if rank:
            return None
        value = convert_outputs(value, *outputs)
        if literals and outputs[0]:
            value = make_literals(value, *outputs)
        decks = flytekit.current_context().decks
        return Returned(value, [(deck.name, deck.html) for deck in decks if not isinstance(deck, TimeLineDeck)])


def make_literals(value: Any, types: dict[str, type], tuple_name: str | None) -> LiteralMap:
    """Return Flyte's literals of a body's results, by the declared ``types``. Uploads files."""
    is_single = len(types) == 1 and not (tuple_name and isinstance(value, tuple))
    values = dict(zip(types, [value] if is_single else value, strict=True))
    return TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, types)
