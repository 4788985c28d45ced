"""Inputs and targets of samples: a leaf, which is an array or a tensor, or a tuple or dict of leaves; None: nothing.

A list is a leaf, too, such as the tokens of a text.
"""

from collections.abc import Callable, Mapping
from typing import Any

Leaves = Any


def map_leaves(function: Callable[[Any], Any], leaves: Leaves) -> Leaves:
    """Return leaves of the same form, each replaced by what ``function`` returns for it; None stays None."""
    if isinstance(leaves, Mapping):
        return {name: map_leaves(function, leaf) for name, leaf in leaves.items()}
    if isinstance(leaves, tuple):
        return tuple(map_leaves(function, leaf) for leaf in leaves)
    return None if leaves is None else function(leaves)


def name_leaves(leaves: Leaves) -> dict[str, Any]:
    """Return each leaf by its name: its key in a dict, its place in a tuple ("0", "1"), or "" for a single leaf."""
    if hasattr(leaves, "shape"):  # arrays first: to ask for a Mapping takes longer than all else here
        return {"": leaves}
    if isinstance(leaves, Mapping):
        return dict(leaves)
    if isinstance(leaves, tuple):
        return {str(place): leaf for place, leaf in enumerate(leaves)}
    return {} if leaves is None else {"": leaves}


def restore_leaves(form: str, named: Mapping[str, Any]) -> Leaves:
    """Return leaves of a form (see :func:`form_of`) out of the leaves by name: the inverse of :func:`name_leaves`."""
    if form == "dict":
        return dict(named)
    return (*named.values(),) if form == "tuple" else next(iter(named.values()), None)


def form_of(leaves: Leaves) -> str:
    """Return the form of leaves: none, leaf, tuple or dict."""
    if isinstance(leaves, Mapping):
        return "dict"
    return "none" if leaves is None else "tuple" if isinstance(leaves, tuple) else "leaf"


def call_with_leaves(function: Callable[..., Any], leaves: Leaves) -> Any:
    """Call a function, such as a model, with a leaf, the leaves of a tuple, or those of a dict as keyword arguments."""
    if isinstance(leaves, Mapping):
        return function(**leaves)
    return function(*leaves) if isinstance(leaves, (tuple, list)) else function(leaves)
