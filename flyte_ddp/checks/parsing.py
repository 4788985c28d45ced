"""Parse JSON and numbers of users, and refuse what readers would understand otherwise than written."""

import json
import re
from collections.abc import Iterator
from typing import Any

from flyte_ddp.errors import UserError

# Numbers such as 1e-1 and 1.5e3: YAML 1.1, by which flytekit reads YAML files, takes them for text.
YAML_NUMBER = re.compile(r"[-+]?(\d+e[-+]?\d+|(\d+\.\d*|\.\d+)e\d+)", re.IGNORECASE)


class MisreadError(UserError):
    """A part of JSON or YAML that readers understand otherwise than it is written, without a word."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        MisreadError: A key is there twice.
        ValueError: The text is not JSON.
        RecursionError: The text is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=make_object)


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if (place := find_doubled(keys)) is not None:
        raise MisreadError(f"the key {keys[place]!r} is there twice; leave one of the two out")
    return dict(pairs)


def find_doubled(keys: list[Any]) -> int | None:
    """Return the place of the first key that repeats another one, or None if all keys differ."""
    return next((place for place, key in enumerate(keys) if key in keys[:place]), None)


def parse_yaml_number(value: Any) -> Any:
    """Return a text such as "1e-1", a number that YAML 1.1 reads as text, as a number, and other values unchanged."""
    return float(value) if isinstance(value, str) and YAML_NUMBER.fullmatch(value) else value


def list_texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value but the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from list_texts(each)
