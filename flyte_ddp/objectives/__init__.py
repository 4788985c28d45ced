"""Objectives: what training minimises and evaluations measure, with a file for each objective.

User-defined objectives derive from Objective or from a built-in objective.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flyte_ddp.core.errors import UserError, unknown_name_error
from flyte_ddp.core.models.sidecar import Sidecar
from flyte_ddp.core.objectives.objective import HIGHER, LOWER, Facts, Objective
from flyte_ddp.core.user_code.callables import check_options_are_accepted, load_callable
from flyte_ddp.objectives.classification import Classification
from flyte_ddp.objectives.language import Language
from flyte_ddp.objectives.multilabel import Multilabel
from flyte_ddp.objectives.regression import Regression
from flyte_ddp.objectives.segmentation import Segmentation

__all__ = ["HIGHER", "LOWER", "Classification", "Facts", "Language", "Multilabel", "Objective", "Regression"]
__all__ += ["Segmentation"]

KINDS: tuple[type[Objective], ...] = (Classification, Multilabel, Regression, Segmentation, Language)
BUILT_IN = {kind.__name__.lower(): kind for kind in KINDS}


def make_objective_of_saved_model(sidecar: Sidecar) -> Objective:
    """Return the objective of a saved model, from the model's sidecar (``model.json``).

    Imports a user-defined objective. If the sidecar names no objective, the objective is classification.

    Raises:
        UserError: The user-defined objective cannot be imported, or does not fit.
    """
    facts = Facts(
        classes=tuple(sidecar.classes),
        target_shape=tuple(sidecar.target_shape or ()),
        class_weights=",".join(map(repr, sidecar.class_weights or ())),
        select_by=sidecar.hyperparameters.get("select_by", "loss"),
        threshold_rule=sidecar.hyperparameters.get("threshold", ""),
        threshold=sidecar.threshold,
    )
    return make_objective(sidecar.objective, facts, sidecar.options.get("objective", {}))


def make_objective(name: str, facts: Facts, options: Mapping[str, Any]) -> Objective:
    """Return the objective called ``name``: a built-in objective, or the user's ``package.module:callable``.

    Imports the callable. A class is called with ``facts`` and ``options``, and its instance is the objective. A
    function of outputs and targets becomes the objective's losses, and gets ``options`` at each call. If the targets
    are classes, the measures are those of classification. Otherwise the loss is the only measure.

    Raises:
        UserError: The name is unknown, or the callable, the options or the measures do not fit.
    """
    if ":" not in name and name not in BUILT_IN:
        raise unknown_name_error("objective", name, [*BUILT_IN, "package.module:callable"])
    named: Any = load_callable(name) if ":" in name else BUILT_IN[name]
    what = f"objective {name!r}"
    if isinstance(named, type):
        check_options_are_accepted(what, named, options, facts)
        objective = named(facts, **options)
        if not isinstance(objective, Objective):
            raise UserError(f"objective={name!r}: must be a subclass of flyte_ddp.objectives.Objective")
        for measure, better in objective.measures.items():
            if better not in (LOWER, HIGHER):
                raise UserError(
                    f"objective={name!r}: measure {measure!r} has {better!r}: must be {LOWER!r} or {HIGHER!r}, "
                    "whichever is better"
                )
        return objective
    base = Classification if facts.classes and not facts.target_shape else Objective
    check_options_are_accepted(what, named, options, None, None)  # in place of outputs and targets

    class FunctionObjective(base):  # type: ignore[misc,valid-type]
        """The objective whose losses a user's function returns."""

        used_hyperparameters = frozenset({"class_weights", "threshold"} if base is Classification else ())
        loss_unit = Objective.loss_unit

        def losses(self, outputs: Any, targets: Tensor) -> Tensor:
            found: Tensor = named(outputs, targets, **options)
            return found

    return FunctionObjective(facts)
