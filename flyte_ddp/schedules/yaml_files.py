"""Parse users' YAML, and reject values that YAML 1.1 reads differently from how they are written."""

import re
from typing import Any

import yaml

from flyte_ddp.core.checks.parsing import DEEPEST, TOO_DEEP, MisreadError, find_first_duplicate, parse_json

TAG = "tag:yaml.org,2002:"
MOST_PARTS = 100_000  # of a file, with each alias counted as a copy of its target
OCTAL_OR_CLOCK = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # 010 is 8, and 1:30 is 90


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # which PyYAML leaves untyped
    """A PyYAML loader that rejects duplicate keys, octal numbers, clock times and dates."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return the node of a mapping. Raise MisreadError for a duplicate key."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value]
        texts = [key.value if isinstance(key, yaml.ScalarNode) else key for key in keys]
        if (place := find_first_duplicate(texts)) is not None:
            where = describe_place(keys[place].start_mark)
            raise MisreadError(f"duplicate key {keys[place].value!r}, {where}; remove one of the two")
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        """Return the node of a value. Raise MisreadError for an octal number, a clock time or a date without quotes."""
        node = super().compose_scalar_node(anchor)
        number = node.tag in (f"{TAG}int", f"{TAG}float") and OCTAL_OR_CLOCK.fullmatch(node.value)
        if node.style is None and (number or node.tag == f"{TAG}timestamp"):
            read = repr(self.construct_object(node)) if number else "a date"
            raise MisreadError(
                f"{node.value} is {read} in YAML, {describe_place(node.start_mark)}; put it in quotes if it is "
                "text; a number must have no colon and no leading 0"
            )
        return node


def load_strictly(text: str) -> Any:
    """Return the value of a text of JSON or YAML. An empty text gives None.

    Raises:
        MisreadError: A part of the text would be read differently from how it is written, or the text is too deep or
            large.
        yaml.YAMLError: The text is neither JSON nor YAML.
    """
    try:
        return parse_json(text)
    except MisreadError:
        raise
    except ValueError:
        pass
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        measure_node(node, {})
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise MisreadError(TOO_DEEP) from None
    except (ValueError, TypeError, OverflowError) as error:  # for numbers and keys that Python cannot represent
        if isinstance(error, MisreadError):
            raise
        raise MisreadError(f"a value cannot be read ({error}); put the value in quotes") from None


def measure_node(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of parts and the number of levels of a node. An alias counts as a copy of its target.

    ``known`` caches the results by the ids of nodes.

    Raises:
        MisreadError: The node has too many parts or levels.
    """
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1, 0
    if id(node) not in known:
        known[id(node)] = MOST_PARTS, 0  # until measured: an alias may contain itself
        pairs = isinstance(node, yaml.MappingNode)
        measured = [measure_node(each, known) for entry in node.value for each in (entry if pairs else (entry,))]
        parts, levels = zip((1, 0), *measured, strict=True)
        known[id(node)] = sum(parts), 1 + max(levels)
    if known[id(node)][0] > MOST_PARTS:
        raise MisreadError(f"aliases (*NAME) expand to more than {MOST_PARTS:,} parts; write their values instead")
    if known[id(node)][1] > DEEPEST:
        raise MisreadError(TOO_DEEP)
    return known[id(node)]


def describe_place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def describe_read_error(error: Exception) -> str:
    """Return why a file of YAML or JSON cannot be read or parsed, in a few words."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"is not valid YAML: {error.problem}, {describe_place(error.problem_mark)}"
    return getattr(error, "strerror", None) or f"is not text: {error}"
