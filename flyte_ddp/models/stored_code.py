"""The user code that a saved model's ``model.json`` names: today's, or the code stored there. Needs no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flyte_ddp.catalog import CODE_OPTIONS
from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.sidecar import Sidecar, read_sidecar
from flyte_ddp.core.user_code.digest import normalize_code, parse_python
from flyte_ddp.core.user_code.source import read_user_sources
from flyte_ddp.core.user_code.stored import StoredSpec


def read_model_json(path: Path) -> Sidecar:
    """Read a ``model.json``. If the user's code has changed since, the result uses the code stored in the file.

    Names of changed code become StoredSpecs, which import the stored code when loaded. To find out, reads the user's
    files, and puts the working directory on ``sys.path``. Imports no user code.

    Raises:
        UserError: The file is missing or damaged, or has another format.
    """
    return use_stored_code_if_changed(read_sidecar(path))


def use_stored_code_if_changed(sidecar: Sidecar) -> Sidecar:
    """Return the sidecar. If the user's code has changed since the training, use the stored code.

    Names of changed code become StoredSpecs, which import the code stored in the sidecar when loaded. If no code is
    stored, returns the same sidecar. Reads the user's files, and puts the working directory on ``sys.path``.
    """
    sources, facts = sidecar.sources, {"model": sidecar.model, "objective": sidecar.objective}
    hyperparameters = {**sidecar.hyperparameters}
    fitted = {"prepare": sidecar.preprocessing.prepare, "table": sidecar.preprocessing.table}
    options = {of: {**given} for of, given in sidecar.options.items()}
    named: list[tuple[JsonObject, str]] = [(facts, "model"), (facts, "objective")]
    named += [(hyperparameters, "collate"), (hyperparameters, "sample")]
    named += [(fitted, "prepare"), (fitted, "table")]
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
        preprocessing=replace(sidecar.preprocessing, prepare=fitted["prepare"], table=fitted["table"]),
    )


def are_current_sources(sources: Mapping[str, str], *specs: str) -> bool:
    """Return whether the user's files that ``specs`` need today have the code in ``sources``, apart from comments.

    Further files in ``sources`` make no difference. If a module does not exist, or the files have over 4 MiB, return
    False. Puts the working directory first on ``sys.path``.
    """
    try:
        today = read_user_sources(*specs)
    except UserError:  # the module is gone
        return False

    def normalize(text: str) -> bytes:
        return normalize_code(text.encode(), parse_python(text.encode()))

    return bool(today) and all(name in sources and normalize(sources[name]) == normalize(today[name]) for name in today)
