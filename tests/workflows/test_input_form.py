"""What flytekit is given as the types of our dataclasses."""

import pytest
from flytekit.core.type_engine import DataclassTransformer

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.checks.fields import CheckedFields
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.release.policy import Policy
from flyte_ddp.sweep.space import Sweep
from tasks.input_form import FormTransformer, KnownTransformer, make_form_schema


@pytest.mark.parametrize("form", [Hyperparameters, Policy, Sweep, WindowSource])
def test_a_forms_type_is_flytekits_own_with_a_schema_for_the_console(form: type[CheckedFields]) -> None:
    expected = DataclassTransformer().get_literal_type(form)
    expected.metadata |= make_form_schema(form())
    assert FormTransformer(form).get_literal_type(form).to_flyte_idl() == expected.to_flyte_idl()


def test_a_dataclass_type_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], DataclassTransformer.get_literal_type
    monkeypatch.setattr(DataclassTransformer, "get_literal_type", lambda *given: made.append(given) or make(*given))
    known = KnownTransformer(Policy)
    first, second = (known.get_literal_type(Policy) for _ in range(2))
    assert first == second
    first.metadata = {}  # as prefill_form() changes what it gets
    assert known.get_literal_type(Policy) == second
    assert len(made) == 1
