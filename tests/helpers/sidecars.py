"""Sidecars of models that no training has made."""

from typing import Any

from flyte_ddp.core.models.inputs import InputSpec, ModelInput
from flyte_ddp.core.models.sidecar import Digests, Sidecar

TINY = InputSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.2,))


def make_sidecar(spec: ModelInput = TINY, model: str = "small_cnn", **values: Any) -> Sidecar:
    """Return a sidecar with the model's input and further fields, by default of two classes."""
    values = {"classes": ["a", "b"], "digests": Digests(weights=""), **values}
    return Sidecar(model=model, input=spec.to_sidecar_input(), **values)
