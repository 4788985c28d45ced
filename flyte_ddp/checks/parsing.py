"""Parse JSON and numbers of users, and refuse what readers would understand otherwise than written."""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from flyte_ddp.errors import UserError

# Numbers such as 1e-1 and 1.5e3: YAML 1.1, by which flytekit reads YAML files, takes them for text.
YAML_NUMBER = re.compile(r"[-+]?(\d+e[-+]?\d+|(\d+\.\d*|\.\d+)e\d+)", re.IGNORECASE)

DEEPEST = 64  # levels of JSON and YAML: functions that call themselves for each level end long after
TOO_DEEP = f"it is nested more than {DEEPEST} levels deep; write it flatter"


class MisreadError(UserError):
    """A part of JSON or YAML that readers understand otherwise than it is written, or that no reader should follow."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        MisreadError: A key is there twice, or the text is nested too deeply.
        ValueError: The text is not JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise MisreadError(TOO_DEEP) from None
    inner = [value]
    for _ in range(DEEPEST):
        inner = [each for outer in inner if isinstance(outer, (dict, list)) for each in list_parts(outer)]
    if inner:
        raise MisreadError(TOO_DEEP)
    return value


def list_parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise MisreadError(f"the key {keys[find_doubled(keys) or 0]!r} is there twice; leave one of the two out")
    return made


def find_doubled(keys: Sequence[Hashable]) -> int | None:
    """Return the place of the first key that repeats another one, or None if all keys differ."""
    known = set[Hashable]()
    for place, key in enumerate(keys):
        if key in known:
            return place
        known.add(key)
    return None


def parse_yaml_number(value: Any) -> Any:
    """Return a text such as "1e-1", a number that YAML 1.1 reads as text, as a number, and other values unchanged."""
    return float(value) if isinstance(value, str) and YAML_NUMBER.fullmatch(value) else value


def list_texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value but the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in list_parts(value):
            yield from list_texts(each)
