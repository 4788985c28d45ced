"""Read ``model.json``, the sidecar of a saved model, and find the user's code that is named there. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from flyte_ddp.catalog import CODE_OPTIONS
from flyte_ddp.datasets.preprocessing import PREPROCESSING, TABLE
from flyte_ddp.errors import UserError
from flyte_ddp.user_code.source import are_todays_sources
from flyte_ddp.user_code.stored import StoredSpec

FORMAT = "flyte-ddp-model/1"


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the content of a ``model.json``, in which user code has the names that :func:`prefer_stored_code` gives.

    Raises:
        UserError: The file is missing, or has another format.
    """
    fix = "give the model.json of a finished run"
    try:
        sidecar = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read sidecar {path}: {error.strerror}; {fix}") from error
    except ValueError as error:
        raise UserError(f"sidecar {path} is not JSON ({error}); {fix}") from error
    form = sidecar.get("format") if isinstance(sidecar, dict) else None
    if form != FORMAT:
        raise UserError(f"sidecar {path} has format {form!r}: it must be {FORMAT!r}; {fix}")
    return prefer_stored_code(sidecar)


def prefer_stored_code(sidecar: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of user code in the sidecar by StoredSpecs, if today's files differ; return the sidecar."""
    sources, hyperparameters = sidecar.get("sources", {}), sidecar.get("hyperparameters", {})
    named = [(sidecar, "model"), (sidecar, "objective"), (hyperparameters, "collate"), (hyperparameters, "sample")]
    named += [(sidecar.get(PREPROCESSING, {}), key) for key in ("prepare", TABLE)]
    if option := CODE_OPTIONS.get(sidecar.get("objective", "")):
        named.append((sidecar.get("options", {}).get("objective", {}), option))
    own = [(values, key) for values, key in named if ":" in str(values.get(key, ""))] if sources else []
    if own and not are_todays_sources(sources, *(values[key] for values, key in own)):
        for values, key in own:
            values[key] = StoredSpec(values[key], sources)
    return sidecar
