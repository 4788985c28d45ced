"""Read ``model.json``, the sidecar of a saved model, and find the user code that is named there. Needs no torch."""

from pathlib import Path
from typing import Any

from flyte_ddp.catalog import CODE_OPTIONS
from flyte_ddp.checks.forms import COUNT, require_form
from flyte_ddp.checks.parsing import parse_json
from flyte_ddp.datasets.preprocessing import PREPROCESSING, TABLE
from flyte_ddp.errors import UserError
from flyte_ddp.user_code.source import are_current_sources
from flyte_ddp.user_code.stored import StoredSpec

FORMAT = "flyte-ddp-model/1"
SIDES = range(1, 2**16)
LEAF = {"shape": [(None, COUNT)], "dtype": {"float", "int64", "bool", "other"}}
LEAVES_INPUT = {"form": {"leaf", "tuple", "dict", "none"}, "leaves": {str: LEAF}}
IMAGE_INPUT = {
    "channels": SIDES,
    "height": SIDES,
    "width": SIDES,
    "mean": [float],
    "std": [float],
    "crop_share?": (None, float),
}
FITTED = {
    "pickle": str,
    "sha256": str,
    "releases": str,
    "prepare?": str,
    f"{TABLE}?": str,
    "rows?": list,
    "columns?": {str: list},
}
FORM = {
    "model?": str,
    "objective?": str,
    "outputs?": COUNT,
    "target_shape?": [COUNT],
    "classes?": [str],
    "class_weights?": [float],
    "threshold?": float,
    "options?": {str: {}},
    "input?": (LEAVES_INPUT, IMAGE_INPUT),
    "hyperparameters?": {},
    "metrics?": {},
    "digests?": {str: str},
    "versions?": {str: str},
    "sources?": {str: str},
    f"{PREPROCESSING}?": {},
}


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the content of a ``model.json``.

    If the user code that the file names has changed since, the names become StoredSpecs, which import the code stored
    in the file. To find out, reads the user's files, and puts the working directory on ``sys.path``. Imports nothing.

    Raises:
        UserError: The file is missing or damaged, or has another format.
    """
    return prefer_stored_code(parse_model_json(path))


def parse_model_json(path: Path) -> dict[str, Any]:
    """Return the content of a ``model.json``. Names of user code stay as written.

    Raises:
        UserError: The file is missing, is not JSON, has another format, or has a value of another type.
    """
    fix = "give the model.json of a finished run"
    try:
        sidecar = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read sidecar {path}: {error.strerror}; {fix}") from error
    except ValueError as error:
        raise UserError(f"sidecar {path} is not JSON ({error}); {fix}") from error
    form = sidecar.get("format") if isinstance(sidecar, dict) else None
    if form != FORMAT:
        raise UserError(f"sidecar {path} has format {form!r}: must be {FORMAT!r}; {fix}")
    require_form(sidecar, FORM, f"sidecar {path} is damaged, so {fix}")
    return dict(sidecar)


def prefer_stored_code(sidecar: dict[str, Any]) -> dict[str, Any]:
    """Replace names of user code in the sidecar by StoredSpecs if today's files differ, and return the same sidecar.

    A StoredSpec imports the code that is stored in the sidecar. Without stored code, nothing is replaced. Reads the
    user's files, and puts the working directory on ``sys.path``.
    """
    sources, hyperparameters = sidecar.get("sources", {}), sidecar.get("hyperparameters", {})
    named = [(sidecar, "model"), (sidecar, "objective"), (hyperparameters, "collate"), (hyperparameters, "sample")]
    named += [(sidecar.get(PREPROCESSING, {}), key) for key in ("prepare", TABLE)]
    if option := CODE_OPTIONS.get(sidecar.get("objective", "")):
        named.append((sidecar.get("options", {}).get("objective", {}), option))
    own = [(values, key) for values, key in named if ":" in str(values.get(key, ""))] if sources else []
    if own and not are_current_sources(sources, *(values[key] for values, key in own)):
        for values, key in own:
            values[key] = StoredSpec(values[key], sources)
    return sidecar
