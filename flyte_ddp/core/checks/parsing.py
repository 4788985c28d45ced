"""Parse JSON and numbers of users, and reject texts that readers would misunderstand."""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from flyte_ddp.core.errors import UserError

# Numbers such as 1e-1 and 1.5e3. YAML 1.1, which flytekit uses to read YAML files, reads them as text.
YAML_NUMBER = re.compile(r"[-+]?(\d+e[-+]?\d+|(\d+\.\d*|\.\d+)e\d+)", re.IGNORECASE)

JsonObject = dict[str, Any]  # an object whose keys users or other programs choose
DEEPEST = 64  # maximum number of levels of JSON and YAML, far below the limit of recursive functions
TOO_DEEP = f"nested more than {DEEPEST} levels deep; reduce the nesting"


class MisreadError(UserError):
    """A part of JSON or YAML that readers would misunderstand, or that is nested too deeply."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text, and reject texts that other readers may misunderstand.

    Raises:
        MisreadError: A key occurs twice, or the text is nested more than 64 levels deep. This is also a ValueError.
        ValueError: The text is not JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=make_object_without_duplicates)
    except RecursionError:
        raise MisreadError(TOO_DEEP) from None
    inner = [value]
    for _ in range(DEEPEST):
        inner = [each for outer in inner if isinstance(outer, (dict, list)) for each in list_parts(outer)]
    if inner:
        raise MisreadError(TOO_DEEP)
    return value


def list_parts(value: JsonObject | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def make_object_without_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Return the pairs of a JSON object as a dict. Raises MisreadError (a UserError) if a key occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise MisreadError(f"the key {keys[find_first_duplicate(keys) or 0]!r} occurs twice; remove one of the two")
    return made


def find_first_duplicate(keys: Sequence[Hashable]) -> int | None:
    """Return the position of the first key that repeats an earlier key, or None if all keys differ."""
    known = set[Hashable]()
    for place, key in enumerate(keys):
        if key in known:
            return place
        known.add(key)
    return None


def parse_yaml_number(value: Any) -> Any:
    """Convert a text such as "1e-1", which YAML 1.1 reads as text, to a float. Other values are returned unchanged."""
    return float(value) if isinstance(value, str) and YAML_NUMBER.fullmatch(value) else value


def iterate_json_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, at any depth, except the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in list_parts(value):
            yield from iterate_json_strings(each)
