"""The tables of names and sizes, compared with what torchvision really has and really takes."""

import dataclasses
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torchvision
from torchvision.models import regnet

from flyte_ddp import catalog, datasets
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.inputs import InputSpec, prepare_inputs
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.models import zoo
from flyte_ddp.objectives import BUILT_IN

ALL = set(torchvision.models.list_models())
CLASSIFIERS = set(torchvision.models.list_models(module=torchvision.models))
CLASSES = 7
# One of each kind of limit; the others, built alike, are marked exhaustive.
QUICK = {"alexnet", "convnext_tiny", "googlenet", "maxvit_t", "regnet_y_400mf", "resnet18", "swin_v2_t", "vit_b_16"}
ANY_SIZE = {model for model, side in catalog.TORCHVISION_MODELS.items() if side == 8}  # the floor for all of these


def images(channels: int, height: int, width: int) -> InputSpec:
    return InputSpec(channels, height, width, (0.5,) * channels, (0.5,) * channels)


def spec_for(model: str, side: int, *, channels: int = 1, width: int | None = None) -> InputSpec:
    return zoo.choose_input_spec(model, images(channels, side, width or side), size=0, weights=None)


def marked(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in names]


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, InputSpec], torch.Size]:
    """Builds a model and runs it forward in training mode on torch's meta device: shapes only, no weights."""
    block_params = regnet.BlockParams.from_init_params

    def on_cpu(**options: Any) -> regnet.BlockParams:  # it computes widths with tensors, which have to have values
        with torch.device("cpu"):
            return block_params(**options)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", on_cpu)

    def run(model: str, spec: InputSpec) -> torch.Size:
        with torch.device("meta"):
            built = zoo.build_model(model, CLASSES, spec).train()
            output: torch.Tensor = built(torch.empty(2, spec.channels, spec.height, spec.width))
        return output.shape

    return run


def test_the_names_are_torchvisions_and_the_librarys() -> None:
    assert list(catalog.TORCHVISION_MODELS) == sorted(CLASSIFIERS)
    assert set(catalog.SIZE_MULTIPLES) <= CLASSIFIERS
    assert set(catalog.SMALL_MODELS) == set(zoo.SMALL_MODELS)
    assert set(catalog.DATASETS) == set(datasets.DATASETS)
    for model in ALL - CLASSIFIERS:
        with pytest.raises(UserError, match=rf"unknown model '{model}': .*choose one of"):
            Hyperparameters(model=model)
    for model in CLASSIFIERS:
        assert Hyperparameters(model=model).model == model


def test_the_classes_and_modules_of_all_kinds_of_data_sets_exist() -> None:
    for kind in catalog.KINDS:
        found = resolve_name(kind.set_class)
        assert issubclass(found, PreparedSet)
        for function in ("open_splits", "open_test_split", "iterate_test_images"):
            assert callable(resolve_name(f"{found.opening}:{function}"))


def test_the_tables_have_all_objectives() -> None:
    settings = catalog.SETTINGS_OF_OBJECTIVES
    [field] = [field for field in dataclasses.fields(Hyperparameters) if field.name == "objective"]
    assert {*BUILT_IN} == {*settings} == {*catalog.MEASURES} == {*field.metadata["choices"]}
    assert {*catalog.OF_CLASSES, *catalog.OF_LENGTHS, *catalog.CODE_OPTIONS} <= {*settings}
    for name, objective in BUILT_IN.items():
        assert objective.used_hyperparameters == {*settings[name]}, name


@pytest.mark.parametrize("model", marked(sorted(CLASSIFIERS)))
def test_the_smallest_size_works_and_one_pixel_less_is_refused(
    model: str, without_memory: Callable[[str, InputSpec], torch.Size]
) -> None:
    """Rightly, where it is refused for more than that nothing would be left to see. Of multiples none between works."""
    smallest, multiple = catalog.TORCHVISION_MODELS[model], catalog.SIZE_MULTIPLES.get(model)
    spec = spec_for(model, smallest)
    assert without_memory(model, spec) == (2, CLASSES)
    with pytest.raises(UserError, match=rf"{model}.* {smallest - 1}x{smallest - 1} .*set image_size={smallest}$"):
        spec_for(model, smallest - 1)
    wrong = smallest - 1
    if multiple:
        assert without_memory(model, spec_for(model, 2 * multiple)) == (2, CLASSES)
        wrong = multiple + 1
        with pytest.raises(UserError, match=rf"a multiple of {multiple}; set image_size={2 * multiple}$"):
            spec_for(model, wrong)
    if model not in ANY_SIZE:
        with pytest.raises((RuntimeError, AssertionError, ValueError)):
            without_memory(model, dataclasses.replace(spec, height=wrong, width=wrong))


def test_grey_images_become_rgb_for_torchvisions_models_only() -> None:
    spec = spec_for("resnet18", 8)
    assert (spec.channels, spec.mean, spec.std) == (3, (0.5,) * 3, (0.5,) * 3)
    grey = torch.randint(0, 256, (2, 8, 8, 1), dtype=torch.uint8)
    batch = prepare_inputs(grey, spec)
    assert torch.equal(batch, batch[:, :1].expand(2, 3, 8, 8))
    torch.testing.assert_close(batch[:, 0], (grey[..., 0] / 255 - 0.5) / 0.5)
    assert zoo.build_model("resnet18", CLASSES, spec)(batch).shape == (2, CLASSES)
    assert [spec_for("small_cnn", 8, channels=channels).channels for channels in (1, 2, 3, 5)] == [1, 2, 3, 5]
    for channels in (2, 4):
        with pytest.raises(UserError, match=f"{channels} channels: .* 1 or 3"):
            spec_for("resnet18", 32, channels=channels)


def test_vision_transformers_refuse_oblong_images() -> None:
    catalog.check_image_size("vit_of_mine:build", 16, 32)  # a user-defined model
    with pytest.raises(UserError, match=r"16x32 images: .* square; set image_size"):
        spec_for("vit_b_16", 16, width=32)
