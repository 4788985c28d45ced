"""What flytekit is given as the type of hyperparameters."""

import pytest
from flytekit.core.type_engine import DataclassTransformer

from flyte_ddp.release.policy import Policy
from tasks.input_form import FormTransformer


def test_a_forms_schema_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], DataclassTransformer.get_literal_type
    monkeypatch.setattr(DataclassTransformer, "get_literal_type", lambda *given: made.append(given) or make(*given))
    form = FormTransformer(Policy)
    first, second = (form.get_literal_type(Policy) for _ in range(2))
    assert first == second
    first.metadata = {}  # as prefill_form() changes what it gets
    assert form.get_literal_type(Policy) == second
    assert len(made) == 1
