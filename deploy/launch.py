"""Launches what is registered, from the terminal: see python deploy/launch.py --help."""

import dataclasses
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import click
import yaml
from flyteidl.core.catalog_pb2 import CACHE_HIT
from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline
from flytekit.clients.helpers import iterate_node_executions, iterate_task_executions
from flytekit.configuration import Config
from flytekit.core.options import Options
from flytekit.exceptions.system import FlyteSystemException
from flytekit.exceptions.user import FlyteEntityNotExistException, FlyteTimeout
from flytekit.interaction.click_types import JsonParamType
from flytekit.models.common import NamedEntityIdentifier
from flytekit.models.core.execution import NodeExecutionPhase, TaskExecutionPhase, WorkflowExecutionPhase
from flytekit.remote import FlyteLaunchPlan, FlyteRemote, FlyteWorkflowExecution

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError, unknown_name
from flyte_ddp.files import replacing
from flyte_ddp.pods.environment import FROM_SCRATCH_VARIABLE
from flyte_ddp.report.report import last_record_in
from tasks.command_line import CALL_SECONDS, check_input_files, show_errors_in_panels

AWAY_SECONDS = 600.0  # the longest that it may be unreachable while we wait for an execution
PAUSE_SECONDS = 15.0  # the most between two looks at an execution, and the least between two at a training's figures
FILES = {"model_state": "model.pt", "sidecar": "model.json", "report": "report.html", "metrics": "metrics.jsonl"}
FIGURES = {"loss": "loss {:.4f}", "samples_per_second": "{:,.0f} samples/s", "test_accuracy": "test accuracy {:.2%}"}
# How a task's error begins where the sentence after it is ours; and what Flyte puts around some of them.
OURS = re.compile(r"^(?:UserError|UnreachableError|RankError|StoppedError|FlyteRecoverableException): (?:\S+ error=)?")


class InSentences(click.Command):
    """A command whose errors are one sentence each, like those of ``pyflyte`` with our workflows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the arguments."""
        with show_errors_in_panels(ctx):
            check_input_files(args)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        with show_errors_in_panels(ctx), scoped_grpc_deadline(CALL_SECONDS):
            return super().invoke(ctx)


@click.command(cls=InSentences)
@click.argument("name")
@click.option(
    "--hp", type=JsonParamType(Hyperparameters), help="What is left out has its default; without: the plan's."
)
@click.option("--config", required=True, type=click.Path(exists=True, dir_okay=False), help="Which cluster.")
@click.option("--project", default="flytesnacks", show_default=True)
@click.option("--domain", default="development", show_default=True)
@click.option("--service-account", help="Of the execution's pods, in Kubernetes; without: the plan's.")
@click.option("--version", help="Of the launch plan; without: the active one, else the newest.")
@click.option("--overwrite-cache", is_flag=True, help="Always retrain, from the first step.")
@click.option("--no-wait", is_flag=True, help="End when it is launched.")
@click.option("--download", "folder", type=click.Path(file_okay=False, path_type=Path), help="For model and report.")
def launch(*, name: str, hp: Hyperparameters | None, config: str, version: str | None, **options: Any) -> None:
    """Launch the launch plan NAME, wait for the execution, and say what it has made and where that is."""
    folder, from_scratch = options["folder"], options["overwrite_cache"]
    if options["no_wait"] and folder:
        raise UserError("--download: with --no-wait there is nothing to download yet; leave one of them out")
    remote = FlyteRemote(configuration(config), default_project=options["project"], default_domain=options["domain"])
    plan = registered(remote, name, version)
    check(plan, hp, folder)
    execution = remote.execute(
        plan,
        inputs={} if hp is None else {"hp": hp},
        type_hints={"hp": Hyperparameters},
        options=Options.default_from(k8s_service_account=options["service_account"]),
        overwrite_cache=from_scratch,
        envs={FROM_SCRATCH_VARIABLE: "yes"} if from_scratch else None,
    )
    where = execution.execution_url
    click.echo(f"launched {name} {plan.id.version}: {where}")
    if options["no_wait"]:
        return
    try:
        Watch(remote, execution, plan).until_done()
    except KeyboardInterrupt:
        raise click.ClickException(
            f"no longer waited for, but the execution goes on: watch it, or terminate it, at {where}; or end it with: "
            f"flytectl --config {config} delete execution {execution.id.name} -p {plan.id.project} -d {plan.id.domain}"
        ) from None
    if not execution.is_successful:
        raise click.ClickException(f"{why(execution)}\nall of it is at {where}")
    outputs = remote.sync_execution(execution).outputs.literals
    tell(outputs)
    if folder is not None:
        download(remote, outputs, folder)


def configuration(path: str) -> Config:
    """A cluster's configuration from a file."""
    with suppress(Exception):  # whatever there is in it
        if yaml.safe_load(Path(path).read_text(encoding="utf-8"))["admin"]["endpoint"]:
            return Config.auto(path)
    raise UserError(f"--config {path}: must name a cluster's address, as deploy/sandbox.yaml does")


def registered(remote: FlyteRemote, name: str, version: str | None) -> FlyteLaunchPlan:
    """The launch plan of this version; without a version the active one, else the newest."""
    project, domain = remote.default_project, remote.default_domain
    try:
        active = None if version else remote.fetch_active_launchplan(name=name)
        return active or remote.fetch_launch_plan(name=name, version=version)
    except FlyteEntityNotExistException:
        projects = [each.id for each in remote.list_projects()]
        if project not in projects:
            raise unknown_name("project", project, projects) from None
        plans = [each.name for each in remote.client.list_launch_plan_ids_paginated(project, domain)[0]]
        if not plans:
            raise UserError(
                f"nothing is registered in domain {domain!r} of project {project!r}: register with deploy/register.sh, "
                "or give another --domain"
            ) from None
        if name not in plans:
            raise unknown_name("launch plan", name, plans) from None
        found, _ = remote.client.list_launch_plans_paginated(NamedEntityIdentifier(project, domain, name), limit=10)
        raise unknown_name("version", str(version), [each.id.version for each in found]) from None


def check(plan: FlyteLaunchPlan, hp: Hyperparameters | None, folder: Path | None) -> None:
    """Refuses inputs or outputs that the registered version does not have, before anything is sent."""
    what = f"{plan.id.name} of version {plan.id.version}"
    inputs, outputs = plan.interface.inputs, plan.interface.outputs
    if hp is not None and "hp" not in inputs:
        raise UserError(f"--hp: {what} takes none, but {', '.join(sorted(inputs)) or 'nothing'}; leave it out")
    known = (inputs["hp"].type.metadata or {}).get("properties") if hp is not None else None
    newer = [field.name for field in dataclasses.fields(Hyperparameters) if field.name not in known] if known else []
    if newer:
        raise UserError(
            f"--hp: {what} is older than these sources, and does not know {', '.join(newer)}; give a newer --version, "
            "register one with deploy/register.sh, or check out the sources of that one"
        )
    if folder is None:
        return
    if missing := [output for output in FILES if output not in outputs]:
        raise UserError(f"--download: {what} does not make {', '.join(missing)}; leave the option out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--download {folder}: {error.strerror}; choose another folder") from None


class Watch:
    """Waits for an execution, and prints what changes in it."""

    def __init__(self, remote: FlyteRemote, execution: FlyteWorkflowExecution, plan: FlyteLaunchPlan) -> None:
        self.client, self.execution = remote.client, execution
        self.names = {node.id: getattr(node.flyte_entity, "name", node.id) for node in plan.flyte_workflow.flyte_nodes}
        self.told: dict[object, str] = {}
        self.began = self.answered = self.looked = time.monotonic()

    def until_done(self) -> None:
        """Returns at its end; the cluster may be unreachable for some minutes."""
        while True:
            try:
                self.execution._closure = self.client.get_execution(self.execution.id).closure
                for node in self.nodes():
                    self.show(node)
                self.answered = time.monotonic()
            except (FlyteSystemException, FlyteTimeout):
                if time.monotonic() - self.answered > AWAY_SECONDS:
                    click.echo("the execution may well go on", err=True)
                    raise
                self.tell("cluster", "the cluster does not answer; the execution may well go on")
            if self.execution.is_done:
                return
            time.sleep(min(PAUSE_SECONDS, 1 + (time.monotonic() - self.began) / 30))

    def nodes(self, parent: str | None = None) -> Iterator[Any]:
        """Yields the nodes that have begun, and those that they have made in turn."""
        for node in iterate_node_executions(self.client, self.execution.id, unique_parent_id=parent):
            if not node.id.node_id.endswith(("start-node", "end-node")):
                yield node
                if node.metadata.is_parent_node:
                    yield from self.nodes(node.id.node_id)

    def show(self, node: Any) -> None:
        """Prints what is new of a node: each attempt's phase, and the figures of a running training."""
        name = self.names.get(node.id.node_id, node.id.node_id).rpartition(".")[2]
        for attempt in iterate_task_executions(self.client, node.id):
            name = attempt.id.task_id.name.rpartition(".")[2]
            phase = TaskExecutionPhase.enum_to_string(attempt.closure.phase)
            said = f": {sentence(attempt.closure.error.message)}" if attempt.closure.error else ""
            number = attempt.id.retry_attempt
            self.tell((node.id.node_id, number), f"{name}, attempt {number + 1}: {phase}{said}")
        found = node.closure.task_node_metadata
        if found is not None and found.cache_status == CACHE_HIT:
            self.tell(node.id.node_id, f"{name}: SUCCEEDED, from the cache")
        running = node.closure.phase == NodeExecutionPhase.RUNNING and node.closure.deck_uri
        if running and time.monotonic() - self.looked > PAUSE_SECONDS:
            with suppress(Exception), scoped_grpc_deadline(CALL_SECONDS / 3):  # they are a courtesy
                self.tell("figures", f"{name}: {figures(self.page(node.id))}")
            self.looked = time.monotonic()

    def page(self, node: Any) -> str:
        """A node's deck."""
        run = self.execution.id
        given = self.client.get_download_artifact_signed_url(node.node_id, run.project, run.domain, run.name)
        return storage.read(given.signed_url[0]).decode()

    def tell(self, topic: object, line: str) -> None:
        """Prints a line, unless it is the last one printed on this topic."""
        if self.told.get(topic) != line:
            click.echo(f"{time.strftime('%H:%M:%S')} {line}")
        self.told[topic] = line


def figures(page: str) -> str:
    """The last record of metrics in a training's page, as text."""
    record = last_record_in(page)
    return ", ".join(
        [f"step {record['step']:,}", *(FIGURES[key].format(record[key]) for key in FIGURES if key in record)]
    )


def why(execution: FlyteWorkflowExecution) -> str:
    """Why an execution has not succeeded."""
    phase, closure = WorkflowExecutionPhase.enum_to_string(execution.closure.phase), execution.closure
    cause = closure.abort_metadata.cause if closure.abort_metadata else "no reason is given"
    return f"the execution has {phase}: {sentence(closure.error.message) if closure.error else cause}"


def sentence(message: str) -> str:
    """The message of a task's error, without its traceback."""
    _, mark, said = message.rpartition("\nMessage:\n")
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [message]
    return OURS.sub("", lines[0 if mark else -1]).partition(", cause=")[0]


def tell(outputs: dict[str, Any]) -> None:
    """Prints the last accuracy, and the outputs with their addresses."""
    if (accuracies := outputs.get("epoch_accuracies")) and accuracies.collection.literals:
        click.echo(f"test accuracy {accuracies.collection.literals[-1].scalar.primitive.value:.2%}")
    for name in sorted(outputs, key=[*FILES, *sorted(outputs)].index):
        if outputs[name].scalar is not None and outputs[name].scalar.blob is not None:
            click.echo(f"  {name:12} {outputs[name].scalar.blob.uri}")


def download(remote: FlyteRemote, outputs: dict[str, Any], folder: Path) -> None:
    """Downloads all files or none, from addresses that the cluster signs: no key of its store is needed."""
    with ExitStack() as files:
        for output, name in FILES.items():
            address = outputs[output].scalar.blob.uri
            signed = remote.client.get_download_signed_url(address).signed_url
            file = files.enter_context(replacing(folder / name))
            try:
                storage.retried(signed, partial(fetch, file=file))
            except storage.UnavailableError as error:
                server = signed.partition("://")[2].partition("/")[0]
                raise UserError(f"{name} cannot be had from {server}: {error}; fetch {address} yourself") from None
    click.echo(f"downloaded {', '.join(FILES.values())} to {folder}")


def fetch(address: str, file: BinaryIO) -> None:
    """Downloads an address into a file."""
    file.seek(0)
    file.truncate()
    with storage.open_file(address) as content:
        storage.check_length(sum(map(file.write, content.chunks)), content.size, remote=True)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # flytekit's own handler ends the process without a message
    launch()
