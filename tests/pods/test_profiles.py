"""Sizes of pods: Kubernetes' quantities, what engines get of a profile, and the templates in deploy/."""

from dataclasses import replace

import pytest
import yaml
from cli import ROOT

from flyte_ddp.core.errors import UserError
from flyte_ddp.pods import profiles
from flyte_ddp.pods.environment import read_wandb_secret_id
from flyte_ddp.pods.profiles import PROFILES, Size, divide_size, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("8", 8), ("3500m", 3.5), (".5", 0.5), ("1k", 1000), ("129e6", 129e6)),
        *(("1.5Gi", 3 * 2**29), ("20G", 2e10), ("2Ei", 2**61)),
        *((wrong, None) for wrong in ("", "0", "-1", "8 cores", "20GB", "20gi", "1e", "Gi", "1.2.3", "nan", "8\n")),
    ],
)
def test_kubernetes_quantities(text: str, number: float | None) -> None:
    if number is None:
        with pytest.raises(UserError, match=r"quantity '.*must be a Kubernetes quantity, such as 8, 3500m"):
            parse_quantity(text)
    else:
        assert parse_quantity(text) == number


@pytest.mark.parametrize(
    ("cpu", "memory", "half", "ranks"),
    [
        ("3500m", "1.5Gi", ("1750m", "768Mi"), 3),
        ("0.5", "2000000000", ("250m", "953Mi"), 1),
        ("8", "4Gi", ("4", "2048Mi"), 4),
    ],
)
def test_profiles_in_any_quantities(cpu: str, memory: str, half: tuple[str, str], ranks: int) -> None:
    profile = replace(PROFILES["local"], cpu=cpu, memory=memory)
    assert divide_size(profile, 1).memory == memory
    assert divide_size(profile, 2) == Size(cpu=half[0], memory=half[1], ephemeral_storage=profile.ephemeral_storage)
    assert profiles.ENGINES["elastic"].ranks_per_node(profile) == ranks


@pytest.mark.parametrize(
    ("text", "nodes"), [("", (1, 1)), ("3:", (3, 3)), ("2:4", (2, 4)), ("0", None), ("many", None), ("4:2", None)]
)
def test_numbers_of_nodes(monkeypatch: pytest.MonkeyPatch, text: str, nodes: tuple[int, int] | None) -> None:
    monkeypatch.setenv("FLYTE_DDP_NODES", text)
    if nodes is None:
        with pytest.raises(UserError, match=f"FLYTE_DDP_NODES='{text}': must be a number of nodes"):
            profiles.read_node_range()
    else:
        assert profiles.read_node_range() == nodes


@pytest.mark.parametrize("name", ["abc", "/key", "group/"])
def test_a_secret_has_a_group_and_a_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FLYTE_DDP_WANDB_SECRET", name)
    with pytest.raises(UserError, match=f"^FLYTE_DDP_WANDB_SECRET='{name}': must be a secret's group/key, such as wan"):
        read_wandb_secret_id()


def test_an_unknown_profile_is_refused_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "gpus")
    with pytest.raises(UserError, match=r"^unknown FLYTE_DDP_PROFILE 'gpus': did you mean 'gpu'\? choose one of "):
        profiles.read_profile()


def test_templates_of_pods() -> None:
    """Those for a read-only root have all of the others, and folders of the pod's own where the image's user writes."""
    ours = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())
    of_gpus = [profile for profile in PROFILES.values() if profile.gpus]
    spec = ours["template"]["spec"]
    [container], [toleration] = spec["containers"], spec["tolerations"]
    assert {profile.pod_template for profile in of_gpus} == {ours["metadata"]["name"]}
    assert {profile.grace_seconds for profile in of_gpus} == {spec["terminationGracePeriodSeconds"]}
    assert container["name"] in ("default", "primary")  # Flyte merges containers of these names, and refuses others
    assert container["imagePullPolicy"] == "IfNotPresent"  # which the API server would otherwise set to Always
    assert (toleration["key"], toleration["effect"]) == ("nvidia.com/gpu", "NoSchedule")

    plain, read_only = yaml.safe_load_all((ROOT / "deploy/pod-template-read-only.yaml").read_text())
    assert (plain["metadata"]["name"], read_only["metadata"]) == ("flyte-ddp-read-only", ours["metadata"])
    specs = [template["template"]["spec"] for template in (plain, read_only)]
    for each in specs:
        [container] = each["containers"]
        assert container.pop("securityContext") == {"readOnlyRootFilesystem": True}
        assert {mount["mountPath"] for mount in container.pop("volumeMounts")} == {"/tmp", "/root"}
        assert [volume["emptyDir"] for volume in each.pop("volumes")] == [{}, {}]
        assert each.pop("securityContext") == {"fsGroup": 1000}
    assert specs == [{"containers": spec["containers"]}, spec]
