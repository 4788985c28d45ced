"""Compute a node's inputs as Flyte's engine does (flytepropeller 1.16: nodes/resolve.go)."""

from collections.abc import Iterable, Mapping

import msgpack
from flyteidl.core.literals_pb2 import Binding, BindingData, Literal
from google.protobuf.json_format import MessageToDict

Outputs = Mapping[str, Mapping[str, Literal]]  # of nodes by their ids; start-node has the workflow's inputs


def resolved(bindings: Iterable[Binding], outputs: Outputs) -> dict[str, Literal]:
    """Return a node's inputs by name."""
    return {binding.var: value_of(binding.binding, outputs) for binding in bindings}


def value_of(data: BindingData, outputs: Outputs) -> Literal:
    """Return the value of a binding: a constant, a node's output, or a part of an output.

    Raises:
        KeyError: The value lacks the part. The engine then reports BindingResolutionError.
    """
    if data.WhichOneof("value") == "scalar":
        return Literal(scalar=data.scalar)
    promise = data.promise
    literal = outputs[promise.node_id or "start-node"][promise.var]
    for step in promise.attr_path:
        name = step.string_value
        if literal.scalar.WhichOneof("value") == "generic":
            fields = literal.scalar.generic.fields
            if name not in fields:
                raise KeyError(name)
            literal = packed(MessageToDict(fields[name]))
        else:
            literal = packed(msgpack.unpackb(literal.scalar.binary.value)[name])
    return literal


def packed(value: object) -> Literal:
    """Return a text, a dataclass or a field of a dataclass as a literal that a task passes to the next task."""
    literal = Literal()
    if isinstance(value, str):
        literal.scalar.primitive.string_value = value
    else:
        literal.scalar.binary.value = msgpack.packb(value)
        literal.scalar.binary.tag = "msgpack"
    return literal
