"""A user's function with its arguments, as ranks get it, and what identifies it."""

import hashlib
import inspect
import io
import math
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CellType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp.errors import UserError
from flyte_ddp.user_code import source as user_source

RETURNED = "returned.pickle"  # what rank 0 has returned: in the run's folder, until the launcher has read it


@dataclass(frozen=True)
class Call:
    """A pickled function with its arguments; ranks alone unpickle it and import its modules. A Work's ``arguments``."""

    name: str  # of the function, for people
    payload: bytes  # cloudpickle's, of function, positional and keyword arguments
    shown: Mapping[str, Any]  # the arguments by name, as JSON values
    code: str  # digest of the function's sources
    own_code: tuple[str, ...] = ()  # package.module:callable of users, whose sources other hosts may lack

    def load(self) -> partial[Any]:
        """Unpickle the call, which imports modules; return the function to call without any further argument."""
        function, args, kwargs = cloudpickle.loads(self.payload)
        return partial(function, *args, **kwargs)


def describe_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], taken: Collection[str] = ()
) -> Call:
    """Return the call, pickled: functions and classes by name if their module has them by that name, else by value.

    ``taken`` are run_ranks' own keywords. Raises UserError for unfit arguments, and for what cannot be sent to ranks.
    """
    if not callable(function):
        raise UserError(f"{function!r} is of type {type(function).__name__}, not callable; give a function")
    called: Any = function
    while isinstance(called, partial):  # so that its arguments count as all others do
        called, args, kwargs = called.func, (*called.args, *args), {**called.keywords, **kwargs}
    function = called
    name = function_name(function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        rule = "is an async function, and ranks call ordinary ones; call asyncio.run(...) in one"
        raise UserError(f"{name}: {rule}")
    if inspect.isgeneratorfunction(function):
        raise UserError(f"{name}: is a generator function, of which ranks would run nothing; return a list, or record")
    try:
        signature = inspect.signature(function)
        unfilled = signature.parameters.keys() - signature.bind_partial(*args, **kwargs).arguments
        clashing = [key for key in taken if key in unfilled]
        arguments = {} if clashing else signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}; give the arguments that it takes") from None
    if clashing:
        raise UserError(
            f"{name}: {clashing[0]}= goes to run_ranks, and the function has a parameter of that name, too; give the "
            f"function its own by position, or run functools.partial(function, {clashing[0]}=...)"
        )
    code, own_code = digest_code(function)
    payload = pickle_call(name, function, *args, **kwargs)
    shown = {key: describe_value(value) for key, value in {**bound_values(function), **arguments}.items()}
    return Call(name, payload, shown, code, own_code)


def bound_values(function: Callable[..., Any]) -> dict[str, Any]:
    """Return by name what a function brings along and no caller gives: a closure's variables, or a method's object."""
    if (owner := getattr(function, "__self__", None)) is not None:
        return {} if isinstance(owner, ModuleType) else {"self": owner}  # that of a builtin function is its module
    if not hasattr(function, "__code__"):
        return {} if isinstance(function, type) else {"self": function}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


class ModulePickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles by name also modules of a class of their own, such as torch.backends.cudnn, which cloudpickle refuses."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType and value.__name__ in sys.modules:
            return import_module, (value.__name__,)
        return super().reducer_override(value)


def pickle_by_value(value: Any) -> bytes:
    file = io.BytesIO()
    ModulePickler(file).dump(value)
    return file.getvalue()


def pickle_call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """Return the pickle of a function and its arguments; UserError, with ``name``, if something cannot be pickled."""
    try:
        return pickle_by_value((function, args, kwargs))
    except Exception as error:  # an object's own code may raise anything
        raise UserError(
            f"{name} or its arguments cannot be sent to ranks ({type(error).__name__}: {error}); make in the function "
            "what cannot be pickled"
        ) from error


def function_name(function: Callable[..., Any]) -> str:
    """Return ``module:function`` for a function, or for what a functools.partial calls."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def describe_value(value: Any, replace: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a JSON value that is equal for equal arguments in all processes: the argument itself, or a text for it.

    ``replace`` returns what is described in a value's place, also within lists, mappings and dataclasses.
    """
    value = replace(value)
    if isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): describe_value(each, replace) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [describe_value(each, replace) for each in value]
        return parts if isinstance(value, (list, tuple)) else sorted(parts, key=repr)  # sets differ between processes
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value) if isinstance(value, (float, Path)) else describe_object(value)


def describe_object(value: Any) -> Any:
    """Return an object's digest; of a class or nn.Module its name; of a function its name and bound values."""
    # A module is known by its class alone: its weights may be random, and are in the checkpoint.
    if isinstance(value, type) or hasattr(value, "state_dict"):
        return function_name(value)
    if not inspect.isroutine(value):
        return digest_value(value)
    bound = {  # functions in it by name alone, because one that calls itself has itself in its closure
        name: function_name(each) if inspect.isroutine(each) else describe_value(each)
        for name, each in bound_values(value).items()
    }
    return [function_name(value), bound] if bound else function_name(value)


class StablePickler(pickle.Pickler):
    """Pickles equal values to equal bytes in all processes, for digests: sets differ in order, tensors in address."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return type(value).__qualname__, sorted(map(digest_value, value))
        torch = sys.modules.get("torch")  # not imported for this: without it there are no tensors
        if torch is not None and isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return str(value.dtype), tuple(value.shape), content.numpy().tobytes()
        return None


def digest_value(value: Any) -> str:
    """Return an object's type and a digest of its pickle; the type alone where plain pickle refuses the object."""
    file = io.BytesIO()
    pickler = StablePickler(file, protocol=4)
    pickler.fast = True  # else equal parts that are one object here, and two there, give other pickles
    try:
        pickler.dump(value)
    except Exception:  # an object's own code may raise anything
        return type(value).__qualname__
    return f"{type(value).__qualname__} {hashlib.sha256(file.getvalue()).hexdigest()[:12]}"


def digest_code(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a function's sources, "" without any, and specs whose modules other hosts need.

    UserError for a module that was changed since its import. In a notebook only the text of the function counts. Puts
    the working directory first on ``sys.path``.
    """
    module, _, name = function_name(function).partition(":")
    name = name.partition(".")[0].strip("<>")  # only the module counts, but "<lambda>" is no valid name
    if module != "__main__":
        spec = f"{module}:{name}"
        return user_source.user_source_digest(spec), (spec,)
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and Path(script).is_file():
        found = [*user_source.find_script_sources(Path(script))]
        specs = {f"{path.partition('/')[0].removesuffix('.py')}:{name}" for path, *_ in found[1:]}
        return user_source.digest_sources(found), tuple(sorted(specs))
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest(), ()
    except (OSError, TypeError):  # typed into a plain interpreter
        return "", ()
