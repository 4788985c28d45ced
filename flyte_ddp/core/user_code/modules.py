"""Find top-level modules without importing them, and reject modules that users may not name."""

import importlib.util
import inspect
import os
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.settings import MODULES, read_nameable_modules

INSTALLED = {"site-packages", "dist-packages"}
STANDARD = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
LIBRARY = {"flyte_ddp", "flytekitplugins"}  # not allowed, because functions of this library also delete files


def find_module_spec(name: str) -> ModuleSpec | None:
    """Return the import spec of a top-level module, or None if the module or its spec does not exist."""
    try:
        if name == "pip":  # setuptools' finder would mistake this process for pip, and hide distutils from torch
            return PathFinder.find_spec(name)
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def list_module_locations(found: ModuleSpec) -> list[str]:
    """Return the paths of a module: the folders of a package, or the file. A built-in module has none."""
    if found.submodule_search_locations is not None:
        return [*found.submodule_search_locations]
    return [found.origin] if found.has_location and found.origin else []


def is_user_file(place: str) -> bool:
    """Return whether a file or folder is outside Python's standard library and site-packages."""
    path = Path(place).resolve()
    return not INSTALLED.intersection(path.parts) and not any(path.is_relative_to(standard) for standard in STANDARD)


def check_module_is_allowed(spec: str, module: str) -> None:
    """Raise UserError if FLYTE_DDP_MODULES is set and neither lists the module nor the module is the user's.

    A module is the user's if all files are outside Python's library and site-packages. A module that does not exist is
    accepted, because the import reports the error. ``spec`` begins the error.
    """
    listed = read_nameable_modules()
    if listed is None or any(f"{module}.".startswith(f"{name}.") for name in listed):
        return
    top = module.partition(".")[0]
    found = find_module_spec(top)
    if found is None and top not in sys.modules:
        return  # importing the module raises the right error
    places = list_module_locations(found) if found else []
    if top not in LIBRARY and places and all(map(is_user_file, places)):
        return
    rule = f"only the project's modules, and modules listed in {MODULES}={os.environ[MODULES]!r}, may be named"
    raise UserError(
        f"{spec!r}: module {module} is not allowed: {rule}; register with another list, or name a module of the project"
    )


def check_callable_is_allowed(spec: str, module: str, found: Any) -> None:
    """Raise UserError if a function or class is defined in another module that FLYTE_DDP_MODULES does not allow.

    Args:
        spec: The start of the error, ``package.module:callable``.
        module: The module that ``spec`` names.
        found: The callable in this module.
    """
    owner = getattr(found, "__module__", None) or "builtins"
    if owner != module and (inspect.isclass(found) or inspect.isroutine(found)):
        check_module_is_allowed(spec, owner)
