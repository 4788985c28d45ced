"""torchvision's weights by name: the table against torchvision, where files come from, and what models start with."""

import hashlib
import io
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from encoded_runs import labelled, quiet, train
from file_server import FileServer
from PIL import Image
from predictions import predict_rows
from surroundings import clean
from torchvision.models import get_model, get_model_weights
from torchvision.models.googlenet import GoogLeNet

from flyte_ddp import catalog
from flyte_ddp.catalog import TORCHVISION_ADDRESS, PretrainedWeights, find_torchvision_weights
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.inputs import InputSpec, prepare_inputs
from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.encoded.cropping import crop_to_square
from flyte_ddp.models import zoo
from flyte_ddp.models.initial_weights import fetch_initial_weights, get_torch_hub_folder, load_initial_weights
from flyte_ddp.plans.identity import check_known_image_size, model_identity
from flyte_ddp.run import Result

DEFAULT = "torchvision:DEFAULT"
GREY = InputSpec(1, 28, 28, (0.1,), (0.2,))


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where torch hub keeps files, not made yet; pauses between tries are short."""
    clean(monkeypatch)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch/hub/checkpoints"


def weights_of(model: str, init_from: str = DEFAULT) -> PretrainedWeights:
    found = find_torchvision_weights(model, init_from)
    assert found is not None
    return found


def of_torchvision(model: str, **options: int) -> torch.nn.Module:
    """Return a new model, for 1,000 classes."""
    google = {"init_weights": False} if model in ("googlenet", "inception_v3") else {}
    return get_model(model, **google, **options)


def test_the_table_is_torchvisions() -> None:
    compared = 0
    for model in catalog.TORCHVISION_MODELS:
        names = {*get_model_weights(model).__members__}
        for name in names:
            theirs, ours = get_model_weights(model)[name], weights_of(model, f"torchvision:{name}")
            assert theirs.url == f"{TORCHVISION_ADDRESS}/{ours.file}"
            digits = torch.hub.HASH_REGEX.search(ours.file)
            assert digits is not None
            assert digits[1] == ours.digest_start
            takes = theirs.transforms()
            assert [ours.side] == takes.crop_size
            assert ours.crop_share == takes.crop_size[0] / takes.resize_size[0]
            compared += 1
        with pytest.raises(UserError) as caught:
            find_torchvision_weights(model, "torchvision:none")
        assert {*re.findall(r"torchvision:([A-Z0-9_]+)", caught.value.message)} == names
    assert compared > 150


@pytest.mark.slow
def test_a_model_gets_the_images_that_torchvision_makes() -> None:
    """Of the size that torchvision cuts the middle out of, so that neither side changes a pixel by resizing."""
    compared = set()
    for model in catalog.TORCHVISION_MODELS:
        for name, theirs in get_model_weights(model).__members__.items():
            takes, weights = theirs.transforms(), weights_of(model, f"torchvision:{name}")
            [resized], [side] = takes.resize_size, takes.crop_size
            if (resized - side) % 2:
                continue  # the middle is between two pixels: torchvision takes the later one, and we the earlier one
            pixels = np.random.default_rng(0).integers(0, 256, (resized, resized + 8, 3), dtype=np.uint8)
            expected = takes(Image.fromarray(pixels))[None]
            if model in ("googlenet", "inception_v3"):
                expected = GoogLeNet._transform_input(GoogLeNet(transform_input=True, init_weights=False), expected)
            spec = zoo.choose_input_spec(model, GREY, 0, weights)
            square = crop_to_square(pixels, spec.height, share=spec.crop_share)
            torch.testing.assert_close(prepare_inputs(torch.from_numpy(square)[None], spec), expected)
            compared.add(model)
    assert len(compared) > 70


def content(model: torch.nn.Module) -> bytes:
    """Return the file of a model's weights, in the form in which torchvision publishes DenseNets."""
    state, buffer = model.state_dict(), io.BytesIO()
    for name in [*state]:
        older = re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", name)
        if older != name:
            value, state._metadata = state.pop(name), {}  # DenseNets are of a time without versions of modules
            if not name.endswith("num_batches_tracked"):
                state[older] = value
    torch.save(state, buffer)
    return buffer.getvalue()


Publish = Callable[[str, bytes], str]


@pytest.fixture
def publish(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Serve a file as a model's default weights, under a name with the digest of its content; return the name."""

    def serve(model: str, content: bytes) -> str:
        name = f"{model}-{hashlib.sha256(content).hexdigest()[:8]}.pth"
        known = catalog.TORCHVISION_WEIGHTS[model]
        best, (_, *sides) = next(iter(known.items()))
        monkeypatch.setitem(known, best, (name, *sides))
        monkeypatch.setattr(get_model_weights(model)["DEFAULT"].value, "url", f"{server.url}/{name}")
        server.files[name] = content
        return name

    return serve


def fetching(model: str, folder: Path, mirror: str) -> AbstractContextManager[Path | None]:
    return fetch_initial_weights(DEFAULT, model, folder, Progress("off"), mirror)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mnasnet0_5", pytest.param("densenet121", marks=pytest.mark.exhaustive)])
def test_a_model_computes_what_torchvisions_does(model: str, publish: Publish, server: FileServer, tmp_path) -> None:
    torch.manual_seed(1)
    publish(model, content(of_torchvision(model)))
    spec = zoo.choose_input_spec(model, GREY, 0, weights_of(model))
    ours = zoo.build_model(model, 1000, spec)
    with fetching(model, tmp_path, server.url) as path:
        assert path is not None
        load_initial_weights(ours, path, name=model, init_from=DEFAULT, init_skip="")
    theirs = get_model(model, weights="DEFAULT")  # finds the file in torch hub's cache
    assert len(server.requests) == 1
    images = torch.randint(0, 256, (2, spec.height, spec.width, 3), dtype=torch.uint8)
    takes = get_model_weights(model)["DEFAULT"].transforms()
    inputs = torchvision.transforms.functional.normalize(images.permute(0, 3, 1, 2) / 255, takes.mean, takes.std)
    with torch.no_grad():
        found, expected = ours.eval()(prepare_inputs(images, spec)), theirs.eval()(inputs)
    assert expected.std() > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=float(1e-4 * expected.abs().max()))


def test_a_file_is_fetched_once_and_replaced_where_it_is_damaged(
    publish: Publish, server: FileServer, hub: Path, tmp_path: Path
) -> None:
    name = publish("resnet18", b"weights")
    for mirror in (server.url, "http://nobody.invalid"):
        with fetching("resnet18", tmp_path, mirror) as path:
            assert path == hub / name
            assert path.read_bytes() == b"weights"
    assert server.requests == [name]
    (hub / name).write_bytes(b"damaged")
    server.faults[name] = [503, "truncate", "alter"]
    with fetching("resnet18", tmp_path, f"{server.url}/") as path:
        assert path.read_bytes() == b"weights"
    assert len(server.requests) == 5
    assert [each.name for each in hub.iterdir()] == [name]


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ([404], "HTTP 404 .*; check the network, or set FLYTE_DDP_WEIGHTS to a folder or mirror"),
        (["alter", "alter"], r"sha256 [0-9a-f]{64} \(7 bytes\) instead of [0-9a-f]{8}; check the network"),
    ],
)
def test_a_file_that_cannot_be_fetched(
    faults: list[int | str], words: str, publish: Publish, server: FileServer, hub: Path, tmp_path: Path
) -> None:
    name = publish("resnet18", b"weights")
    server.faults[name] = faults
    said = rf"^init_from='torchvision:DEFAULT': cannot get {server.url}/{name}: {words}"
    with pytest.raises(UserError, match=said), fetching("resnet18", tmp_path, server.url):
        pass
    assert [*hub.iterdir()] == []


def test_without_a_cache_folder_its_variable_is_named(
    publish: Publish, server: FileServer, hub: Path, tmp_path: Path
) -> None:
    publish("resnet18", b"weights")
    hub.parent.parent.write_text("no folder")
    with pytest.raises(UserError, match=r"^cannot write .*, or choose another folder, by TORCH_HOME$"):
        fetching("resnet18", tmp_path, server.url).__enter__()


@pytest.mark.parametrize("variables", [{"TORCH_HOME": "~/there"}, {"XDG_CACHE_HOME": "/there"}, {}])
def test_the_cache_folder_is_torch_hubs(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(get_torch_hub_folder()) == torch.hub.get_dir()


@pytest.mark.parametrize(
    ("model", "init_from", "words"),
    [
        ("resnet50", "torchvision:DEFUALT", r"did you mean 'torchvision:DEFAULT'\? .*DEFAULT, .*_V1, .*_V2$"),
        ("resnet18", "torchvision:", r"choose one of torchvision:DEFAULT, torchvision:IMAGENET1K_V1$"),
        ("small_cnn", DEFAULT, "torchvision model, not 'small_cnn'; set model to .* such as resnet18"),
    ],
)
def test_what_has_no_such_weights_is_refused_before_anything_starts(model: str, init_from: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Hyperparameters(model=model, init_from=init_from)


def test_the_identity_is_the_files_and_asks_nobody(server: FileServer, publish: Publish) -> None:
    hp = Hyperparameters(model="resnet50", init_from=DEFAULT)
    named = {
        name: model_identity(replace(hp, init_from=f"torchvision:{name}"))["initial_weights"]
        for name in ("DEFAULT", "IMAGENET1K_V2", "IMAGENET1K_V1")
    }
    assert named["DEFAULT"] == named["IMAGENET1K_V2"] != named["IMAGENET1K_V1"]
    assert re.fullmatch("[0-9a-f]{64}", named["DEFAULT"])
    publish("resnet50", b"weights")
    assert model_identity(hp)["initial_weights"] not in named.values()
    assert server.requests == []


def test_the_size_is_that_of_the_weights_unless_another_is_set() -> None:
    hp = Hyperparameters(model="vit_b_16", init_from="torchvision:IMAGENET1K_SWAG_E2E_V1")
    weights = weights_of(hp.model, hp.init_from)
    assert [zoo.choose_input_spec(hp.model, GREY, size, weights).height for size in (0, 96)] == [384, 96]
    check_known_image_size(hp)  # the digits, of 8x8 pixels, are too small without these weights
    with pytest.raises(UserError, match="does not accept 8x8"):
        check_known_image_size(replace(hp, init_from=""))


def red_scores(result: Result, folder: Path, **given: Path | None) -> dict[str, str]:
    """Return what a run's model thinks how red images are, by their names."""
    rows = predict_rows(result.model, result.sidecar, folder / "table.csv", **given)
    return {row["id"]: row["score_red"] for row in rows}


@pytest.mark.slow
def test_a_run_starts_from_torchvisions_weights(publish: Publish, server: FileServer, tmp_path: Path) -> None:
    """mnasnet0_75's take more of an image's middle than is usual."""
    model = "mnasnet0_75"
    torch.manual_seed(1)
    theirs = of_torchvision(model)
    publish(model, content(theirs))
    hp = Hyperparameters(
        dataset=f"image_folder:{labelled(tmp_path / 'images')}", model=model, init_from=DEFAULT, num_ranks=1,
        max_steps=1, batch_size=8, learning_rate=1e-15, weight_decay=0.0,
    )  # fmt: skip
    result = train(hp, tmp_path, quiet(tmp_path, weights_source=server.url))
    sidecar = json.loads(result.sidecar.read_text())
    takes = get_model_weights(model)["DEFAULT"].transforms()
    found = [sidecar["input"][key] for key in ("height", "width", "mean", "std", "crop_share")]
    assert found == [224, 224, takes.mean, takes.std, 224 / takes.resize_size[0]]
    after = torch.load(result.model, weights_only=True)
    for name, value in theirs.state_dict().items():
        if "running" not in name and "num_batches" not in name:
            assert name.startswith("classifier") or torch.allclose(after[name], value, atol=1e-6)
    data = fetch(hp.dataset, "", tmp_path / "prepared", progress="off")
    of_split = red_scores(result, tmp_path, images=None, dataset=data)
    of_files = red_scores(result, tmp_path, images=tmp_path / "images", dataset=None)
    assert len(of_split) == 3
    assert of_split.items() < of_files.items()
