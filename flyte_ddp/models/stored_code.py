"""The user code that a saved model's ``model.json`` names: today's, or the code stored there. Needs no torch."""

from dataclasses import replace
from pathlib import Path

from flyte_ddp.catalog import CODE_OPTIONS
from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.models.sidecar import Sidecar, read_sidecar
from flyte_ddp.core.samples.preprocessing import TABLE
from flyte_ddp.core.user_code.source import are_current_sources
from flyte_ddp.core.user_code.stored import StoredSpec


def read_model_json(path: Path) -> Sidecar:
    """Return the content of a ``model.json``.

    If the user code that the file names has changed since, the names become StoredSpecs, which import the code stored
    in the file. To find out, reads the user's files, and puts the working directory on ``sys.path``. Imports nothing.

    Raises:
        UserError: The file is missing or damaged, or has another format.
    """
    return prefer_stored_code(read_sidecar(path))


def prefer_stored_code(sidecar: Sidecar) -> Sidecar:
    """Return the sidecar with StoredSpecs in place of names of user code, if today's files differ.

    A StoredSpec imports the code that is stored in the sidecar. Without stored code, returns the same sidecar. Reads
    the user's files, and puts the working directory on ``sys.path``.
    """
    sources, facts = sidecar.sources, {"model": sidecar.model, "objective": sidecar.objective}
    hyperparameters, preprocessing = {**sidecar.hyperparameters}, {**sidecar.preprocessing}
    options = {of: {**given} for of, given in sidecar.options.items()}
    named: list[tuple[JsonObject, str]] = [(facts, "model"), (facts, "objective")]
    named += [(hyperparameters, "collate"), (hyperparameters, "sample")]
    named += [(preprocessing, "prepare"), (preprocessing, TABLE)]
    if option := CODE_OPTIONS.get(sidecar.objective):
        named.append((options.get("objective", {}), option))
    own = [(values, key) for values, key in named if ":" in str(values.get(key, ""))] if sources else []
    if not own or are_current_sources(sources, *(values[key] for values, key in own)):
        return sidecar
    for values, key in own:
        values[key] = StoredSpec(values[key], sources)
    return replace(
        sidecar,
        model=facts["model"],
        objective=facts["objective"],
        options=options,
        hyperparameters=hyperparameters,
        preprocessing=preprocessing,
    )
