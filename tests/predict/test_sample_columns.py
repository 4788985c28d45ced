"""Columns of inputs and outputs, against values computed by NumPy and SciPy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage, special, stats
from sidecars import make_sidecar

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.inputs import InputSpec, LeafSpec, LeavesSpec, prepare_inputs
from flyte_ddp.core.models.sidecar import FittedObject
from flyte_ddp.datasets.collate import collate_samples
from flyte_ddp.objectives import Facts, make_objective
from flyte_ddp.predict.sample_columns import (
    Reference,
    SampleColumns,
    compute_sample_columns,
    join_columns,
)

RANDOM = np.random.default_rng(0)


def describe(spec: Any, inputs: Any, outputs: Any = None, objective: Any = None, **sidecar: Any) -> SampleColumns:
    """Describe a batch of a model that has nothing but its input and objective."""
    outputs = torch.zeros(5, 2) if outputs is None else outputs
    objective = objective or make_objective("regression", Facts(target_shape=(2,)), {})
    return compute_sample_columns(
        SimpleNamespace(spec=spec, objective=objective, sidecar=make_sidecar(**sidecar)), inputs, outputs
    )


def leaves_spec(**leaves: LeafSpec) -> LeavesSpec:
    return LeavesSpec("dict", (*leaves.items(),))


def test_pictures_are_described_as_they_were_before_the_normalisation() -> None:
    pixels = RANDOM.integers(0, 256, (5, 9, 7, 3)).astype(np.uint8)
    spec = InputSpec(3, 9, 7, (0.1, 0.4, 0.7), (0.2, 0.3, 0.5))
    found = describe(spec, prepare_inputs(torch.from_numpy(pixels), spec))
    grey = pixels.mean(3) / 255
    np.testing.assert_allclose(found["brightness"], grey.mean((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(found["contrast"], grey.std((1, 2), ddof=1), rtol=1e-5)
    sharp = [np.log(ndimage.laplace(each)[1:-1, 1:-1].var(ddof=1)) for each in grey]
    np.testing.assert_allclose(found["sharpness"], sharp, rtol=1e-4)


def test_a_table_has_its_columns_or_if_those_are_many_the_rows_mean_and_deviation() -> None:
    few, many = RANDOM.normal(size=(2, 5, 80))
    inputs = {"few": torch.tensor(few[:, :2]), "many": torch.tensor(many), "one": torch.arange(5)}
    spec = leaves_spec(few=LeafSpec((2,), "float"), many=LeafSpec((80,), "float"), one=LeafSpec((), "int64"))
    found = describe(spec, inputs, preprocessing=FittedObject(columns={"few": ["age", "height"]}))
    np.testing.assert_array_equal(found["input few age"], few[:, 0])
    np.testing.assert_array_equal(found["input few height"], few[:, 1])
    np.testing.assert_allclose(found["input many mean"], many.mean(1))
    np.testing.assert_allclose(found["input many deviation"], many.std(1))
    assert found["input one"].tolist() == [0, 1, 2, 3, 4]
    assert "input few 0" in describe(spec, inputs)


def test_numbers_that_numpy_has_not_or_that_have_two_parts_are_columns() -> None:
    spec = leaves_spec(half=LeafSpec((2,), "float"), wave=LeafSpec((), "float"))
    half = torch.tensor(RANDOM.normal(size=(5, 2))).bfloat16()
    wave = RANDOM.normal(size=5) + 1j * RANDOM.normal(size=5)
    found = describe(spec, {"half": half, "wave": torch.tensor(wave)})
    np.testing.assert_array_equal(found["input half 1"], half[:, 1].double())
    np.testing.assert_array_equal(found["input wave 0"], wave.real)
    np.testing.assert_array_equal(found["input wave 1"], wave.imag)


def test_a_text_has_a_length_and_a_token_that_stands_for_all() -> None:
    texts = [RANDOM.integers(1, 9, length) for length in RANDOM.integers(1, 40, 400)]
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    series = torch.where(padded > 0, padded * 0.5, 0.0)[..., None].repeat(1, 1, 3)
    inputs = {"text": padded, "mask": padded > 0, "series": series}
    kinds = {"text": "int64", "mask": "bool", "series": "float"}
    spec = leaves_spec(**{name: LeafSpec((None, 3)[: inputs[name].dim() - 1], kind) for name, kind in kinds.items()})
    found = describe(spec, inputs, torch.zeros(400, 2))
    assert {*found} >= {"input text length", "input text token", "input series mean"}
    assert not [name for name in found if "mask" in name]
    assert found["input text length"].tolist() == [len(text) for text in texts]
    tokens = found["input text token"]
    assert all(int(token) in text for token, text in zip(tokens, texts, strict=True))
    expected = np.mean([np.bincount(text, minlength=9) / len(text) for text in texts], axis=0)
    assert np.abs(np.bincount(tokens.astype(int), minlength=9) / 400 - expected).max() < 4 * (0.25 / 400) ** 0.5
    np.testing.assert_allclose(found["input series mean"], [0.5 * text.mean() for text in texts], rtol=1e-6)


def outputs_of(name: str, facts: Facts, outputs: np.ndarray, options: dict[str, Any] | None = None) -> SampleColumns:
    objective = make_objective(name, facts, options or {})
    return describe(leaves_spec(), {}, torch.tensor(outputs), objective)


def test_outputs_by_objective() -> None:
    logits = RANDOM.normal(size=(5, 3))
    found, shares = outputs_of("classification", Facts(("a", "b", "c")), logits), special.softmax(logits, 1)
    assert found["prediction"].tolist() == ["abc"[place] for place in logits.argmax(1)]
    np.testing.assert_allclose(found["confidence"], shares.max(1))
    np.testing.assert_allclose(found["entropy"], stats.entropy(shares, axis=1))

    found, shares = outputs_of("multilabel", Facts(("a", "b", "c"), (3,)), logits), special.expit(logits)
    assert found["prediction"].tolist() == [
        ", ".join(name for name, share in zip("abc", row, strict=True) if share >= 0.5) or "none" for row in shares
    ]
    np.testing.assert_allclose(found["probability_b"], shares[:, 1])

    assert [*outputs_of("regression", Facts(), logits[:, :1])] == ["prediction"]
    found = outputs_of("regression", Facts(target_shape=(3,)), logits)
    np.testing.assert_array_equal(found["prediction_2"], logits[:, 2])
    many = RANDOM.normal(size=(5, 70))
    found = outputs_of("regression", Facts(target_shape=(70,)), many)
    np.testing.assert_allclose(found["output deviation"], many.std(1))

    masks = RANDOM.normal(size=(5, 2, 4, 4))
    found = outputs_of("segmentation", Facts(("ground", "tree")), masks)
    np.testing.assert_allclose(found["share_tree"], masks.argmax(1).mean((1, 2)))

    texts = RANDOM.normal(size=(5, 6, 4))
    found = outputs_of("language", Facts(("a", "b", "c", "d")), texts)
    np.testing.assert_allclose(found["entropy"], stats.entropy(special.softmax(texts, 2), axis=2).mean(1))


def test_places_after_the_end_of_a_text_do_not_count() -> None:
    """Its own tokens tell where it ends, as new texts have no targets."""
    logits, tokens = RANDOM.normal(size=(2, 6, 4)), torch.tensor([[1, 2, 0, 0, 0, 0], [1, 2, 3, 0, 1, 2]])
    language, spec = (
        make_objective("language", Facts(("a", "b", "c", "d")), {}),
        leaves_spec(x=LeafSpec((None,), "int64")),
    )
    found = describe(spec, {"x": tokens}, torch.tensor(logits), language)
    expected = special.softmax(logits, 2).max(2)
    np.testing.assert_allclose(found["confidence"], [expected[0, :2].mean(), expected[1].mean()])


def test_columns_do_not_depend_on_the_batch() -> None:
    texts = [torch.tensor(RANDOM.integers(1, 9, length)) for length in RANDOM.integers(1, 80, 40)]
    language = make_objective("language", Facts(tuple("abcdefghi")), {})
    spec, table = leaves_spec(x=LeafSpec((None,), "int64")), torch.tensor(RANDOM.normal(size=(9, 9)))

    def describe_padded(batch: list[torch.Tensor]) -> SampleColumns:
        tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        return describe(spec, {"x": tokens}, table[tokens], language)

    alone = join_columns([describe_padded([text]) for text in texts])
    for name, values in describe_padded(texts).items():
        kind = np.testing.assert_array_equal if values.dtype.kind in "iU" else np.testing.assert_allclose
        kind(values, alone[name])


@pytest.mark.parametrize(("form", "masked"), [("leaf", ""), ("tuple", "0"), ("dict", "text")])
def test_the_mask_of_padded_inputs_is_no_column(form: str, masked: str) -> None:
    """It is as wide as the longest sample of a batch, so that no two batches would have the same columns."""
    texts = [RANDOM.integers(1, 9, length) for length in (2, 5, 9, 40)]
    wrapped: dict[str, Any] = {
        "leaf": lambda text: text,
        "tuple": lambda text: (text,),
        "dict": lambda text: {masked: text},
    }
    samples = [(wrapped[form](text), None) for text in texts]
    spec = LeavesSpec(form, ((masked, LeafSpec((None,), "int64")),))
    found = [
        describe(spec, collate_samples(part, ["a", "b"], padded=True, masked=masked)[0], torch.zeros(2, 2))
        for part in (samples[:2], samples[2:])
    ]
    assert [*join_columns(found)] == [*found[1]]
    length = f"input {masked}".rstrip() + " length"
    assert [each for part in found for each in part[length].tolist()] == [2, 5, 9, 40]


@pytest.mark.parametrize("samples", [7, 6000])
def test_a_reference_has_up_to_5000_samples_and_any_names(tmp_path: Path, samples: int) -> None:
    columns = {"file": np.arange(samples), "prediction": np.array(["é", "long name"] * samples)[:samples]}
    measured = {"loss": torch.arange(float(samples)).double(), "file": torch.arange(samples * 99.0).reshape(-1, 99)}
    for name in ("one", "two"):
        Reference(columns, measured).write_file(tmp_path / name)
    content = (tmp_path / "one").read_bytes()
    assert content == (tmp_path / "two").read_bytes()
    reference = Reference.from_bytes(content)
    found, kept = reference.columns, reference.measured
    assert [*found] == [*columns]
    drawn = found["file"]
    assert len(drawn) == min(samples, 5000) == len({*drawn.tolist()})
    assert found["prediction"].tolist() == columns["prediction"][drawn].tolist()
    chosen = kept["loss"].long()
    assert len(chosen) == min(samples, 2500) == len({*chosen.tolist()}), "250,000 numbers, 100 of each"
    assert kept["file"].equal(measured["file"][chosen])
    np.savez_compressed(tmp_path / "before.npz", np.array([*found]), *found.values())
    before = Reference.from_bytes((tmp_path / "before.npz").read_bytes())
    assert ([*before.columns], before.measured) == ([*columns], {})


def test_an_output_with_the_name_of_an_input_is_refused() -> None:
    objective = make_objective("regression", Facts(target_shape=(2,)), {})
    objective.answers = lambda outputs: {"input age": outputs[:, 0].tolist()}  # type: ignore[method-assign]
    spec, named = leaves_spec(few=LeafSpec((1,), "float")), FittedObject(columns={"few": ["age"]})
    inputs = {"few": torch.zeros(5, 1)}
    assert [*describe(spec, inputs, objective=objective, preprocessing=named)] == ["input few age", "input age"]
    objective.answers = lambda outputs: {"input few age": outputs[:, 0].tolist()}  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"answers and the inputs .* column 'input few age'; rename"):
        describe(spec, inputs, objective=objective, preprocessing=named)
