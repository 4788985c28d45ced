"""New rows for a model: the user's ``prepare`` makes them inputs, with what was fitted for the model's training."""

import base64
import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.columns import require_same_columns
from flyte_ddp.datasets.preprocessing import PREPROCESSING
from flyte_ddp.datasets.sample_arrays import convert_inputs
from flyte_ddp.errors import UserError
from flyte_ddp.samples.leaves import Leaves
from flyte_ddp.user_code.callables import load_callable
from flyte_ddp.user_code.source import explain_own_errors
from flyte_ddp.user_code.stored import StoredSpec, import_stored_module


class StoredUnpickler(pickle.Unpickler):
    """Loads classes from the modules that ``spec`` holds if it is a :class:`StoredSpec`, and others by import."""

    def __init__(self, spec: str, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.sources = spec.sources if isinstance(spec, StoredSpec) else {}

    def find_class(self, module: str, name: str) -> Any:
        path = module.replace(".", "/")
        if {f"{path}.py", f"{path}/__init__.py"} & self.sources.keys():
            module = import_stored_module(self.sources, module).__name__
        return super().find_class(module, name)


def read_new_rows(sidecar: Mapping[str, Any], source: Any) -> tuple[Leaves, NDArray[np.str_] | None]:
    """Return the inputs [N, ...] of new rows, as the model of a sidecar takes them, and their ids.

    Unpickles the model's preprocessing, and calls ``prepare`` with it and ``source``, a path or whatever else it takes:
    trust ``model.json`` as you trust code. Raises UserError for a model without a preprocessing, one that cannot be
    unpickled here, an exception of ``prepare``, and inputs that :func:`flyte_ddp.arrays` would refuse.
    """
    packed = sidecar.get(PREPROCESSING)
    if not packed:
        raise UserError(
            "the model has no preprocessing: give preprocessing= and prepare= to arrays(...) in the data set and train "
            "again, or predict a dataset"
        )
    content, where = base64.b64decode(packed["pickle"]), f"prepare={packed['prepare']!r}"
    if hashlib.sha256(content).hexdigest() != packed["sha256"]:
        raise UserError("the preprocessing in model.json is damaged; take the file from the run again")
    prepare = load_callable(packed["prepare"])
    try:
        preprocessing = StoredUnpickler(packed["prepare"], content).load()
    except Exception as error:  # whatever the user's own objects raise
        raise UserError(
            f"the preprocessing in model.json cannot be read here ({type(error).__name__}: {error}); it was made with "
            f"{packed['releases']}, and needs the modules that its objects come from"
        ) from error
    with explain_own_errors(where):
        returned = prepare(preprocessing, source)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise UserError(f"{where}: returned {type(returned).__name__}; must return (inputs, ids), ids may be None")
    inputs, ids = convert_inputs(f"{where}: ", returned[0], returned[1])
    require_same_columns(f"{where}: inputs", returned[0], packed.get("columns", {}))
    return inputs, ids
