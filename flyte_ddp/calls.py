"""Make the Call of a user-defined function: pickled with its arguments, and with a digest that identifies the code."""

import hashlib
import inspect
import io
import math
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CellType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loops.call import Call
from flyte_ddp.core.user_code import source as user_source


def pickle_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], taken: Collection[str] = ()
) -> Call:
    """Return the pickled call, with the arguments as JSON values and a digest of the code.

    Functions and classes are pickled by name if their module has the same object by this name, else by value. Puts the
    working directory first on ``sys.path``. ``taken`` names the keyword arguments that the caller gave to run_ranks.

    Raises:
        UserError: The arguments do not fit the function, or cannot be sent to ranks.
        UserError: ``function`` is async, a generator function or no function, or a module has changed since the import.
    """
    if not callable(function):
        raise UserError(f"{function!r} is of type {type(function).__name__}, not callable; pass a function")
    called: Any = function
    while isinstance(called, partial):  # so that the arguments of a partial count, too
        called, args, kwargs = called.func, (*called.args, *args), {**called.keywords, **kwargs}
    function = called
    name = get_function_name(function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        rule = "is an async function; pass an ordinary function that calls asyncio.run(...)"
        raise UserError(f"{name}: {rule}")
    if inspect.isgeneratorfunction(function):
        raise UserError(f"{name}: is a generator function, and ranks would not run its body; return a list, or record")
    try:
        signature = inspect.signature(function)
        unfilled = signature.parameters.keys() - signature.bind_partial(*args, **kwargs).arguments
        clashing = [key for key in taken if key in unfilled]
        arguments = {} if clashing else signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}; pass arguments that fit its signature") from None
    if clashing:
        raise UserError(
            f"{name}: {clashing[0]}= goes to run_ranks, but the function also has a parameter {clashing[0]}; pass the "
            f"function's argument by position, or run functools.partial(function, {clashing[0]}=...)"
        )
    code, user_code = compute_code_digest_and_modules(function)
    payload = pickle_for_ranks(name, function, *args, **kwargs)
    shown = {key: make_comparable_value(value) for key, value in {**get_bound_values(function), **arguments}.items()}
    return Call(name, payload, shown, code, user_code)


def get_bound_values(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values bound to a function, by name: a closure's variables, or a method's object as "self".

    An object that can be called, and is no function, is its own "self".
    """
    if (owner := getattr(function, "__self__", None)) is not None:
        return {} if isinstance(owner, ModuleType) else {"self": owner}  # the owner of a builtin function is its module
    if not hasattr(function, "__code__"):
        return {} if isinstance(function, type) else {"self": function}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


class ModulePickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles by name also modules of a special class, such as torch.backends.cudnn.

    Without this class, cloudpickle rejects modules of a special class.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType and value.__name__ in sys.modules:
            return import_module, (value.__name__,)
        return super().reducer_override(value)


def pickle_by_value(value: Any) -> bytes:
    file = io.BytesIO()
    ModulePickler(file).dump(value)
    return file.getvalue()


def pickle_for_ranks(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """Return the pickle of a function and its arguments.

    Raises:
        UserError: Something cannot be pickled. The text has ``name``.
    """
    try:
        return pickle_by_value((function, args, kwargs))
    except Exception as error:  # an object's own code may raise anything
        raise UserError(
            f"{name} or its arguments cannot be sent to ranks ({type(error).__name__}: {error}); create objects that "
            "cannot be pickled inside the function"
        ) from error


def get_function_name(function: Callable[..., Any]) -> str:
    """Return ``module:function`` of a function, or of the function that a functools.partial calls."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def make_comparable_value(value: Any, replace: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a JSON value that stands for an argument, and is equal for equal arguments in all processes.

    Lists, mappings and dataclasses become lists and dicts. Only the class of an nn.Module counts. If pickle rejects an
    object, only its type counts. Therefore different arguments may get equal values. ``replace`` is applied to each
    value first, also within lists, mappings and dataclasses.
    """
    value = replace(value)
    if isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): make_comparable_value(each, replace) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [make_comparable_value(each, replace) for each in value]
        return parts if isinstance(value, (list, tuple)) else sorted(parts, key=repr)  # sets differ between processes
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value) if isinstance(value, (float, Path)) else make_comparable_object(value)


def make_comparable_object(value: Any) -> Any:
    """Return a JSON description of an object.

    A class or an nn.Module is described by its name, and a function by name and bound values. Any other object is
    described by type and digest.
    """
    # A module is known by its class alone, because the weights may be random, and are in the checkpoint.
    if isinstance(value, type) or hasattr(value, "state_dict"):
        return get_function_name(value)
    if not inspect.isroutine(value):
        return compute_value_digest(value)
    bound = {  # inner functions by name alone, because a recursive function is in its own closure
        name: get_function_name(each) if inspect.isroutine(each) else make_comparable_value(each)
        for name, each in get_bound_values(value).items()
    }
    return [get_function_name(value), bound] if bound else get_function_name(value)


class StablePickler(pickle.Pickler):
    """Pickles equal values to equal bytes in all processes, for digests.

    An ordinary pickle depends on the order of sets and on the addresses of tensors.
    """

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return type(value).__qualname__, sorted(map(compute_value_digest, value))
        torch = sys.modules.get("torch")  # not imported for this, because tensors exist only after the import
        if torch is not None and isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return str(value.dtype), tuple(value.shape), content.numpy().tobytes()
        return None


def compute_value_digest(value: Any) -> str:
    """Return an object's type and a digest of its pickle.

    If plain pickle rejects the object, returns only the type.
    """
    file = io.BytesIO()
    pickler = StablePickler(file, protocol=4)
    pickler.fast = True  # else equal parts give another pickle if they are the same object
    try:
        pickler.dump(value)
    except Exception:  # an object's own code may raise anything
        return type(value).__qualname__
    return f"{type(value).__qualname__} {hashlib.sha256(file.getvalue()).hexdigest()[:12]}"


def compute_code_digest_and_modules(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a function's sources, and specs (package.module:name) of the modules that other hosts need.

    Without sources, the digest is "". In a notebook, only the text of the function counts. Puts the working directory
    first on ``sys.path``.

    Raises:
        UserError: A module was changed since its import.
    """
    module, _, name = get_function_name(function).partition(":")
    name = name.partition(".")[0].strip("<>")  # only the module counts, but "<lambda>" is not a valid name
    if module != "__main__":
        spec = f"{module}:{name}"
        return user_source.compute_user_code_digest(spec), (spec,)
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and Path(script).is_file():
        found = [*user_source.iterate_script_sources(Path(script))]
        specs = {f"{path.partition('/')[0].removesuffix('.py')}:{name}" for path, *_ in found[1:]}
        return user_source.compute_sources_digest(found), tuple(sorted(specs))
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest(), ()
    except (OSError, TypeError):  # typed into a plain interpreter
        return "", ()
