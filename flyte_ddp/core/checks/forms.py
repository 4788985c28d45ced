"""Check that a JSON value has the form that readers expect, before the value is used.

A form is a type (float also accepts whole numbers), None, a range of whole numbers, or a set of texts. ``[form]`` is a
list of items of a form. ``{str: form}`` is an object of values of a form. In ``{"key": form, "other?": form}``, the
object must have "key", may have "other", and may have further keys. A tuple is a choice of forms.
"""

import sys
from collections.abc import Mapping
from typing import Any

from flyte_ddp.core.checks.fields import LARGEST_INT, TYPES, short_repr
from flyte_ddp.core.errors import UserError

COUNT = range(LARGEST_INT + 1)
WORDS: dict[Any, str] = {**TYPES, dict: "an object", list: "a list", None: "null"}


def check_form(value: Any, form: Any, where: str) -> None:
    """Raise UserError if a JSON value does not have ``form`` (see the module). The error names the first wrong part.

    ``where`` begins the error.
    """
    if misfit := find_misfit(value, form, ""):
        raise UserError(f"{where}: {misfit}")


def find_misfit(value: Any, form: Any, place: str) -> str:
    """Return a text about the first part of a value that does not have ``form``, or "" if all parts have.

    The text has place, value and rule. ``place`` is the position of ``value`` in the whole, for example
    ``input.leaves``, or "" for the whole. If no form of a tuple fits, the text is about the last form.
    """
    if isinstance(form, tuple):
        found = [find_misfit(value, each, place) for each in form]
        return "" if "" in found else found[-1]
    if isinstance(form, list) and isinstance(value, list):
        return next(filter(None, (find_misfit(each, form[0], f"{place}[{at}]") for at, each in enumerate(value))), "")
    if isinstance(form, dict) and isinstance(value, dict):
        return find_misfit_in_object(value, form, f"{place}." if place else "")
    if has_outer_form(value, form):
        return ""
    return f"{place or 'all'}={short_repr(value)}: must be {describe_form(form)}"


def find_misfit_in_object(value: Mapping[str, Any], form: Mapping[Any, Any], place: str) -> str:
    """Return a text about an object's first missing key or first value without the form, or "" if all is right.

    ``place`` is "", or the position of the object with a final dot.
    """
    forms = dict.fromkeys(value, form[str]) if str in form else {key.removesuffix("?"): form[key] for key in form}
    if missing := [key for key in forms if key not in value and f"{key}?" not in form]:
        return f"{place}{missing[0]} is missing"
    found = (find_misfit(value[key], each, f"{place}{key}") for key, each in forms.items() if key in value)
    return next(filter(None, found), "")


def has_outer_form(value: Any, form: Any) -> bool:
    """Return whether a value has a form (see the module), without a look at the items of lists and objects.

    The form must not be a tuple. The form ``float`` rejects NaN and infinity.
    """
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, set):
        return isinstance(value, str) and value in form
    if form is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    kind = type(form) if isinstance(form, (dict, list)) else form or type(None)
    return isinstance(value, kind) and (kind is not int or type(value) is int)


def describe_form(form: Any) -> str:
    """Return a text of the values that a form allows, such as "a list". Items of lists are not described."""
    if isinstance(form, range):
        return f"a whole number from {form.start} to {form.stop - 1}"
    if isinstance(form, set):
        return f"one of {', '.join(sorted(form))}"
    return WORDS[type(form) if isinstance(form, (dict, list)) else form]
