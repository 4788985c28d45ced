"""The register script, in a clone of its own; the image's recipe; the cluster's configuration."""

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import packaged
import pytest
import yaml
from cli import ROOT, Ended
from fake_flyte_admin import fake_flyte_admin
from flyteidl.admin.launch_plan_pb2 import ACTIVE, LaunchPlanUpdateRequest
from flytekit.configuration import Config, ImageConfig, SerializationSettings
from flytekit.remote import FlyteRemote
from image import make_commands
from kubernetes import client

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.user_code.digest import package_digest
from workflows.training import training_on_demand

BIN = Path(sys.executable).parent
# What a pod needs.
SOURCES = ("config/", "flyte2/", "flyte_ddp/", "flytekitplugins/", "flyteplugins/", "tasks/", "workflows/")
GIT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} | {
    f"GIT_{who}_{what}": "test@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def git(clone: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=clone, env={**os.environ, **GIT}, text=True).strip()


def commit(clone: Path) -> str:
    return git(clone, "rev-parse", "--short=12", "HEAD")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is here, as the one commit of a repository, with a library that is not the installed one."""
    folder = tmp_path_factory.mktemp("clone") / "project"
    packaged.copy_project(folder)
    (folder / "flyte_ddp/__init__.py").write_text('__version__ = "the clone\'s"\n')
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All of it")
    return folder


@pytest.fixture
def clone(committed: Path, tmp_path: Path) -> Path:
    """A copy of that repository, with what lies about in one that is used."""
    folder = tmp_path / "project"
    shutil.copytree(committed, folder)
    for name in (".venv/lib/module.py", "runs/digits/model.pt", "build/old.tgz", "flyte_ddp/__pycache__/x.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not for pods")
    return folder


def register(clone: Path, *arguments: str, **environment: str) -> Ended:
    """Runs the script from the clone's folder, with this environment's pyflyte on the path."""
    own = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(clone.parent), **GIT}
    return run("deploy/register.sh", *arguments, cwd=clone, env={**own, **environment})


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> Ended:
    """Runs a command; both its streams together."""
    ended = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return Ended(ended.returncode, ended.stdout)


def sources_of(clone: Path) -> set[str]:
    """What pods must be sent; and .dockerignore, which the matcher that flytekit takes from docker never leaves out."""
    committed = git(clone, "ls-files").splitlines()
    return {name for name in committed if name.startswith((*SOURCES, "examples/"))} | {".dockerignore"}


WEEKLY = """
- name: weekly_release
  workflow: release_wf
  cron: "30 4 * * 0"
  model_name: pets
  hyperparameters: config/smoke.json
  policy: {rule: not_worse}
"""
LEFT_OUT = (
    *(".aws/credentials", ".ssh/id_ed25519", ".kube/config", ".docker/config.json", ".config/gcloud/key.json"),
    *(".env.local", "config/.env", "examples/.env.production", "id_rsa", "tasks/id_ecdsa", "notes.pem", "tls.key"),
    *("kubeconfig.yaml", "credentials.json", "config/application_default_credentials.json", ".netrc", "cert.p12"),
    *("my-service-account.json", ".git-credentials", "wandb/notes.txt"),
)


def commit_secrets(clone: Path) -> None:
    """Commit all changes, and files that pods must not get."""
    for name in LEFT_OUT:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("not for pods")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "A schedule of one's own, and secrets that are in the repository")


COMPLETE = ["--config", "deploy/sandbox.yaml", "--image", "flyte-ddp:1", "--profile", "sandbox"]


@pytest.fixture
def faked(clone: Path) -> Path:
    """A clone whose own environment has a pyflyte that says how it was called and does nothing."""
    programs = {"pyflyte": 'echo "called: $*"', "python": f'[ "$1" != -m ] || exec {sys.executable} "$@"'}
    (clone / ".venv/bin").mkdir()
    for name, line in programs.items():
        (clone / ".venv/bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (clone / ".venv/bin" / name).chmod(stat.S_IRWXU)
    return clone


def version(clone: Path, *options: str, copy: str = "all", **environment: str) -> str:
    """Register by a pyflyte that does nothing; return the version."""
    ended = register(clone, *COMPLETE, *options, **environment)
    found = re.search(rf"^called: .* --version (\S+) --copy {copy} ", ended.output, re.MULTILINE)
    assert found, ended.output
    return found[1]


def list_unknown_fields(value: Any, kind: str) -> list[str]:
    """Return the fields of a value that Kubernetes' own client does not know in an object of this kind."""
    if isinstance(value, list):
        return [field for each in value for field in list_unknown_fields(each, kind[len("List[") : -1])]
    model = getattr(client, kind, None)
    if model is None:
        return []
    types = {model.attribute_map[name]: found for name, found in model.openapi_types.items()}
    found = [f"{kind}.{field}" for field in value if field not in types]
    for field in types.keys() & value.keys():
        found += list_unknown_fields(value[field], types[field])
    return found


def test_what_kubectl_applies_has_only_fields_that_kubernetes_knows() -> None:
    assert list_unknown_fields({"spec": {"ingress": [{"form": []}]}}, "V1NetworkPolicy") == [
        "V1NetworkPolicyIngressRule.form"
    ]
    for file in ("pod-template.yaml", "pod-template-read-only.yaml", "network-policy.yaml"):
        for given in yaml.safe_load_all((ROOT / "deploy" / file).read_text()):
            assert list_unknown_fields(given, f"V1{given['kind']}") == [], file


def test_the_network_policy_admits_neighbours_and_operators_only() -> None:
    [policy] = yaml.safe_load_all((ROOT / "deploy/network-policy.yaml").read_text())
    spec = policy["spec"]
    assert (spec["podSelector"], spec["policyTypes"]) == ({}, ["Ingress"]), "every pod; what it asks is not limited"
    [rule] = spec["ingress"]
    neighbours, operators = rule["from"]
    assert (neighbours, {*rule}) == ({"podSelector": {}}, {"from"}), "of this namespace only, as no other is selected"
    assert operators.keys() == {"namespaceSelector"}
    keys = [each["key"] for each in operators["namespaceSelector"]["matchExpressions"]]
    assert keys == ["kubernetes.io/metadata.name"]


@pytest.mark.slow
def test_a_dry_run_packs_all_sources_and_lists_what_would_be_trained(clone: Path, tmp_path: Path) -> None:
    with (clone / "config/schedules.yaml").open("a") as file:
        file.write(WEEKLY)
    commit_secrets(clone)
    environment = {"FLYTE_DDP_NODES": "2:4", "FLYTE_DDP_REGISTRY": "s3://bucket/models"}
    ended = register(clone, *COMPLETE, "--profile", "gpu", "--dry-run", **environment)
    assert ended.exit_code == 0, ended.output
    [archive] = (clone / "build").glob("flyte-package-*.tgz")
    assert archive.name.startswith(f"flyte-package-{commit(clone)}-gpu-")
    package = packaged.read(archive, tmp_path / "package")
    assert package.sources is not None
    files = packaged.names(package.sources)
    assert files == sources_of(clone) - {*LEFT_OUT}
    assert {"flyte_ddp/report/templates/report.css", "flyte_ddp/core/variables.toml", "config/schedules.yaml"} <= files
    variables = packaged.container(package.tasks["tasks.training.train_model"].template).env
    registered = {pair.key: pair.value for pair in variables}
    assert registered["FLYTE_DDP_PROFILE"] == "gpu"
    assert registered["FLYTE_DDP_CODE"] == package_digest(clone / "flyte_ddp") != package_digest()
    [command] = [line for line in ended.output.splitlines() if "To register: " in line]
    settings = "FLYTE_DDP_NODES=2:4 FLYTE_DDP_REGISTRY=s3://bucket/models"
    assert f"To register: env FLYTE_DDP_PROFILE=gpu {settings} " in command, "as its version says"
    *_, weekly, last = filter(None, ended.output.splitlines())
    name, _, values = weekly.partition(" ")
    shown = json.loads(values)
    assert (name, shown["workflow"], shown["cron"]) == ("weekly_release", "release_wf", "30 4 * * 0")
    smoke = Hyperparameters.from_json((clone / "config/smoke.json").read_text())
    assert shown["hyperparameters"] == json.loads(smoke.json()), "the preset's content"
    assert shown["policy"] == {"rule": "not_worse"}
    assert last.startswith("Schedules are unchanged: add --activate")


@pytest.mark.slow
def test_flyte_2_sends_the_same_sources(clone: Path, tmp_path: Path) -> None:
    """Patterns of .flyteignore match at any depth for ``flyte run --copy-style all``, and at the top for flytekit."""
    from flyte._code_bundle.bundle import build_code_bundle  # the SDK has no public function

    commit_secrets(clone)
    bundle = asyncio.run(build_code_bundle(clone, dryrun=True, copy_bundle_to=tmp_path, copy_style="all"))
    assert packaged.names(Path(bundle.tgz)) == sources_of(clone) - {*LEFT_OUT, "examples/README.md"}


def write_config(endpoint: str, file: Path) -> None:
    config = yaml.safe_load((ROOT / "deploy/sandbox.yaml").read_text())
    config["admin"]["endpoint"] = endpoint
    file.write_text(yaml.safe_dump(config))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_registration_sends_everything_and_activates_what_it_is_told_to(clone: Path, tmp_path: Path) -> None:
    cluster = ["--config", str(tmp_path / "cluster.yaml"), "--image", "flyte-ddp:1", "--profile", "gpu"]
    options = ["--project", "vision", "--domain", "production", "--activate", "--service-account", "trainer"]
    with fake_flyte_admin() as admin:
        write_config(admin.endpoint, tmp_path / "cluster.yaml")
        ended = register(clone, *cluster, *options)
    assert ended.exit_code == 0, ended.output
    created = [*admin.tasks, *admin.workflows, *admin.launch_plans]
    assert (len(admin.tasks), len(admin.workflows), len(admin.launch_plans)) == (23, 13, 16)
    assert {(entity.id.project, entity.id.domain) for entity in created} == {("vision", "production")}
    [registered] = {entity.id.version for entity in created}
    assert registered.startswith(f"{commit(clone)}-gpu-")
    accounts = {plan.spec.security_context.run_as.k8s_service_account for plan in admin.launch_plans}
    assert accounts == {"trainer"}, "of each plan, also of those that Flyte makes for workflows"
    activated = [(plan.id.name, plan.id.version, plan.state) for plan in admin.activated]
    assert sorted(activated) == sorted((plan.id.name, registered, ACTIVE) for plan in admin.launch_plans)
    [upload] = admin.uploads
    (tmp_path / "sources.tar.gz").write_bytes(upload)
    assert packaged.names(tmp_path / "sources.tar.gz") == sources_of(clone)
    for task in admin.tasks:
        arguments = packaged.container(task.spec.template).args
        assert arguments[:2] == ["pyflyte-fast-execute", "--additional-distribution"]
        assert arguments[2].startswith("s3://bucket/vision/production/")


def test_launching_from_python_takes_the_active_plan_else_the_newest(tmp_path, monkeypatch, capsys) -> None:
    """By the program in docs/deployment.md, as printed."""
    [program] = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/deployment.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "deploy").mkdir()
    monkeypatch.chdir(tmp_path)
    with fake_flyte_admin() as admin:
        write_config(admin.endpoint, tmp_path / "deploy/sandbox.yaml")
        remote = FlyteRemote(Config.for_endpoint(admin.endpoint, insecure=True), "flytesnacks", "development")
        for version in ("older", "newer"):
            settings = SerializationSettings(ImageConfig.auto_default_image(), "flytesnacks", "development", version)
            remote.register_launch_plan(training_on_demand, version, serialization_settings=settings)
        exec(program, {})
        older = next(plan.id for plan in admin.launch_plans if plan.id.name == "training_on_demand")
        admin.activated.append(LaunchPlanUpdateRequest(id=older, state=ACTIVE))
        exec(program, {})
    assert [each.spec.launch_plan.version for each in admin.executions] == ["newer", "older"]
    for each in admin.executions:
        assert b"epochs" in each.inputs.literals["hp"].SerializeToString()
    assert capsys.readouterr().out.count("/console/projects/flytesnacks/domains/development/executions/") == 2


def test_a_tree_that_differs_from_its_commit_is_refused(faked: Path) -> None:
    (faked / "flyte_ddp/untracked.py").write_text("# a change\n")
    ended = register(faked, *COMPLETE)
    headline, changed = ended.output.splitlines()
    assert ended.exit_code == 1
    assert headline.startswith("Error: the working tree differs from its commit")
    assert changed.endswith("flyte_ddp/untracked.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profil", "gpu"], "unknown argument '--profil': see deploy/register.sh --help"),
        ([*COMPLETE, "--config", "deploy/no.yaml"], "--config deploy/no.yaml: file does not exist; choose deploy/"),
        (
            [*COMPLETE, "--config", "deploy/production.yaml"],
            "--config deploy/production.yaml: 'endpoint: dns:///flyte.example.com' is an example: put your cluster's",
        ),
        *(
            ([*COMPLETE, "--image", image], f"--image '{image}': must end with a tag or a digest, such as ")
            for image in ("a b:1", "localhost:5000/flyte-ddp")
        ),
        (COMPLETE[2:], "--config is missing: "),
    ],
)
def test_bad_arguments_are_refused_in_one_line(committed: Path, arguments: list[str], message: str) -> None:
    ended = register(committed, "--dry-run", *arguments, FLYTE_DDP_PROFILE="gpu")
    assert ended.exit_code == 1
    [line] = ended.output.splitlines()
    assert line.startswith(f"Error: {message}")


def test_the_version_names_commit_profile_and_settings(faked: Path) -> None:
    plain = version(faked)
    assert re.fullmatch(rf"{commit(faked)}-sandbox-[0-9a-f]{{6}}", plain)
    secrets = {"WANDB_API_KEY": "secret", "FLYTE_DDP_ELASTIC_KEY": "secret"}  # leave no trace, not even a digest
    assert version(faked, FLYTE_DDP_PROFILE="gpu", **secrets) == plain  # the option decides on the profile
    others = [
        version(faked, WANDB_PROJECT="digits"),
        version(faked, "--image", "flyte-ddp:2"),
        version(faked, "--profile", "gpu"),
        version(faked, "--sources-in-image", copy="none"),
        version(faked, "--service-account", "trainer"),
    ]
    assert len({plain, *others}) == 6
    git(faked, "tag", "v1.0")
    assert version(faked) == plain.replace(commit(faked), "v1.0")


def test_secrets_are_not_printed(faked: Path) -> None:
    secrets = {"WANDB_API_KEY": "hidden", "FLYTE_DDP_ELASTIC_KEY": "hidden"}
    ended = register(faked, *COMPLETE, "--dry-run", WANDB_PROJECT="digits", **secrets)
    assert ended.exit_code == 0, ended.output
    assert "WANDB_PROJECT=digits" in ended.output
    assert "hidden" not in ended.output
    assert "FLYTE_DDP_ELASTIC_KEY is not sent to pods" in ended.output
    refused = register(faked, *COMPLETE, "--dry-run", WANDB_BASE_URL="https://me:hidden@wandb.example.com")
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: WANDB_BASE_URL='https://***@wandb.example.com': has a user name or a")
    assert "hidden" not in refused.output


def test_the_dockerfiles_are_clean(tmp_path: Path) -> None:
    """Ours, and the one of users' projects, which installs what the project's wheel is called."""
    page = (ROOT / "docs/your-project.md").read_text()
    [recipe] = re.findall(r"^```dockerfile\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "Dockerfile").write_text(recipe)
    ended = run(BIN / "hadolint", "--no-color", ROOT / "Dockerfile", tmp_path / "Dockerfile")
    assert (ended.exit_code, ended.output) == (0, "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"
    assert re.findall(r"\S+\.whl", recipe) == [f"dist/{wheel}", f"/tmp/{wheel}"]


def test_what_flyte_and_operators_call_is_in_the_image(tmp_path: Path) -> None:
    """The commands in a table of docs/engines.md; the locked packages' are those of this environment."""
    make_commands(tmp_path)
    text = (ROOT / "docs/engines.md").read_text()
    [rows] = re.findall(r"^\| what .* call in the image \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    commands = {command for row in rows.splitlines() for command in re.findall("`([^`]+)`", row.split("|")[2])}
    assert {"pyflyte-execute", "dask-worker", "ray", "wget"} <= commands
    [packages] = re.findall("apt-get install --yes --no-install-recommends (.*?) &&", DOCKERFILE)
    of_debian = {"bash", "grep", *packages.split()}  # the first two without being named
    assert {each for each in commands if not shutil.which(each, path=f"{tmp_path}:{BIN}")} <= of_debian


def test_the_image_pins_its_base_and_runs_without_root() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.1[0-2]\.\d+-slim-\w+", stages[0])
    assert stages[1:] == ["dependencies", "dependencies"]
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert int(user) > 0
    assert "--require-hashes" in DOCKERFILE


def test_no_secret_can_get_into_a_layer() -> None:
    instructions = re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE, re.MULTILINE)
    given = [text for name, text in instructions if name in ("ARG", "ADD")]
    assert given == ["LOCK=requirements.lock"], "the name of a file of the repository"
    variables = [text for name, text in instructions if name == "ENV"]
    assert variables == ["PYTHONPATH=/root PYTHONUNBUFFERED=1 FLYTE_DISABLE_SENTRY=true", "PYTHONPATH=/sources"]
    copied = {text.split()[-1] for name, text in instructions if name == "COPY"}
    assert copied == {name.rstrip("/") for name in SOURCES}
    folders = [text for name, text in instructions if name == "WORKDIR"]
    assert folders == ["/root", "/sources"], "the first is where flytekit unpacks sources, unless told otherwise"
    for template in yaml.safe_load_all((ROOT / "deploy/pod-template-read-only.yaml").read_text()):
        [container] = template["template"]["spec"]["containers"]
        hidden = [each for each in container["volumeMounts"] if Path("/sources").is_relative_to(each["mountPath"])]
        assert not hidden, "folders of a pod's own hide no baked sources"
