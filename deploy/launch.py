"""Launch a registered launch plan from the terminal: see python deploy/launch.py --help."""

import dataclasses
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

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
from flytekit.models.core.execution import TaskExecutionPhase, WorkflowExecutionPhase
from flytekit.remote import FlyteLaunchPlan, FlyteRemote, FlyteWorkflowExecution

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.files import replace_file
from flyte_ddp.pods.environment import FROM_SCRATCH_VARIABLE
from tasks.command_line import CALL_SECONDS, show_errors_in_panels

AWAY_SECONDS = 600.0  # how long the cluster may be unreachable while this command waits for an execution
PAUSE_SECONDS = 15.0  # longest time between two queries of an execution
FILES = {"model_state": "model.pt", "sidecar": "model.json", "report": "report.html", "metrics": "metrics.jsonl"}
# Prefixes, ours and Flyte's, of an error message that is a sentence of this package.
ERROR_PREFIX = re.compile(
    r"^(?:UserError|UnreachableError|RankError|StoppedError|FlyteRecoverableException): (?:\S+ error=)?"
)


class CommandWithShortErrors(click.Command):
    """A command that shows each known error as one sentence, as ``pyflyte`` does with this package's workflows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with show_errors_in_panels(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with show_errors_in_panels(ctx), scoped_grpc_deadline(CALL_SECONDS):
            return super().invoke(ctx)


@click.command(cls=CommandWithShortErrors)
@click.argument("name")
@click.option(
    "--hp", type=JsonParamType(Hyperparameters), help="Those left out have their defaults; without: the plan's."
)
@click.option("--config", required=True, type=click.Path(exists=True, dir_okay=False), help="The cluster's file.")
@click.option("--project", default="flytesnacks", show_default=True)
@click.option("--domain", default="development", show_default=True)
@click.option("--service-account", help="Kubernetes service account of the pods; without: the plan's.")
@click.option("--version", help="Version of the launch plan; without: the active one, else the newest.")
@click.option("--overwrite-cache", is_flag=True, help="Always retrain, from the first step.")
@click.option("--no-wait", is_flag=True, help="End when the execution is launched.")
@click.option("--download", "folder", type=click.Path(file_okay=False, path_type=Path), help="For model and report.")
def launch(*, name: str, hp: Hyperparameters | None, config: str, version: str | None, **options: Any) -> None:
    """Launch the launch plan NAME, wait for the execution, and print the addresses of its outputs."""
    folder, from_scratch = options["folder"], options["overwrite_cache"]
    if options["no_wait"] and folder:
        raise UserError("--download: with --no-wait there is nothing to download yet; leave one of them out")
    remote = FlyteRemote(read_config(config), default_project=options["project"], default_domain=options["domain"])
    plan = fetch_launch_plan(remote, name, version)
    check_launch_plan(plan, hp, folder)
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
        ExecutionWatch(remote, execution, plan).wait_until_done()
    except KeyboardInterrupt:
        raise click.ClickException(
            f"no longer waited for, but the execution goes on: watch it, or terminate it, at {where}; or end it with: "
            f"flytectl --config {config} delete execution {execution.id.name} -p {plan.id.project} -d {plan.id.domain}"
        ) from None
    if not execution.is_successful:
        phase, closure = WorkflowExecutionPhase.enum_to_string(execution.closure.phase), execution.closure
        cause = closure.abort_metadata.cause if closure.abort_metadata else "no reason is given"
        reason = extract_sentence(closure.error.message) if closure.error else cause
        raise click.ClickException(f"the execution has {phase}: {reason}\nthe whole error is at {where}")
    outputs = remote.sync_execution(execution).outputs.literals
    if (accuracies := outputs.get("epoch_accuracies")) and accuracies.collection.literals:
        last = accuracies.collection.literals[-1].scalar.primitive.value
        of_classes = hp is not None and hp.objective == "classification" and hp.select_by in ("loss", "accuracy")
        click.echo(f"test accuracy {last:.2%}" if of_classes else f"main measure of the test split {last:.4g}")
    for output in sorted(outputs, key=[*FILES, *sorted(outputs)].index):
        scalar = outputs[output].scalar
        if scalar is not None and scalar.blob is not None:
            click.echo(f"  {output:12} {scalar.blob.uri}")
        elif scalar is not None and scalar.primitive is not None and scalar.primitive.string_value:
            click.echo(f"  {output:12} {scalar.primitive.string_value}")  # of a release: outcome, version, champion
    if folder is not None:
        download_outputs(remote, outputs, folder)
        click.echo(f"downloaded {', '.join(FILES.values())} to {folder}")


def read_config(path: str) -> Config:
    with suppress(Exception):  # the file may hold anything
        if yaml.safe_load(Path(path).read_text(encoding="utf-8"))["admin"]["endpoint"]:
            return Config.auto(path)
    raise UserError(f"--config {path}: must name a cluster's address, as deploy/sandbox.yaml does")


def fetch_launch_plan(remote: FlyteRemote, name: str, version: str | None) -> FlyteLaunchPlan:
    """Return the launch plan of this version; without a version the active one, else the newest."""
    project, domain = remote.default_project, remote.default_domain
    try:
        active = None if version else remote.fetch_active_launchplan(name=name)
        return active or remote.fetch_launch_plan(name=name, version=version)
    except FlyteEntityNotExistException:
        projects = [each.id for each in remote.list_projects()]
        if project not in projects:
            raise unknown_name_error("project", project, projects) from None
        plans = [each.name for each in remote.client.list_launch_plan_ids_paginated(project, domain)[0]]
        if not plans:
            raise UserError(
                f"nothing is registered in domain {domain!r} of project {project!r}: register with deploy/register.sh, "
                "or give another --domain"
            ) from None
        if name not in plans:
            raise unknown_name_error("launch plan", name, plans) from None
        found, _ = remote.client.list_launch_plans_paginated(NamedEntityIdentifier(project, domain, name), limit=10)
        raise unknown_name_error("version", str(version), [each.id.version for each in found]) from None


def check_launch_plan(plan: FlyteLaunchPlan, hp: Hyperparameters | None, folder: Path | None) -> None:
    """Raise a UserError if the version cannot take ``hp``, or make the files to download; create their folder."""
    what = f"{plan.id.name} of version {plan.id.version}"
    inputs, outputs = plan.interface.inputs, plan.interface.outputs
    if hp is not None:
        if "hp" not in inputs:
            raise UserError(f"--hp: {what} takes none, but {', '.join(sorted(inputs)) or 'nothing'}; leave it out")
        known = (inputs["hp"].type.metadata or {}).get("properties")
        newer = [field.name for field in dataclasses.fields(hp) if known and field.name not in known]
        if newer:
            raise UserError(
                f"--hp: {what} is older than these sources, and does not know {', '.join(newer)}; give a newer "
                "--version, register one with deploy/register.sh, or check out the sources of that one"
            )
    if folder is not None:
        if missing := [output for output in FILES if output not in outputs]:
            raise UserError(f"--download: {what} does not make {', '.join(missing)}; leave the option out")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--download {folder}: {error.strerror}; choose another folder") from None


class ExecutionWatch:
    """Waits for an execution, and prints to stdout what changes in it."""

    def __init__(self, remote: FlyteRemote, execution: FlyteWorkflowExecution, plan: FlyteLaunchPlan) -> None:
        self.client, self.execution = remote.client, execution
        self.names = {node.id: getattr(node.flyte_entity, "name", node.id) for node in plan.flyte_workflow.flyte_nodes}
        self.printed: dict[object, str] = {}  # the last line on each topic
        self.began = self.answered = time.monotonic()

    def wait_until_done(self) -> None:
        """Query the execution until it ends, at first every second, later every PAUSE_SECONDS; print changes.

        If the cluster is unreachable for AWAY_SECONDS, raises flytekit's exception.
        """
        while True:
            try:
                self.execution._closure = self.client.get_execution(self.execution.id).closure
                for node in self.iterate_nodes():
                    self.print_changes(node)
                self.answered = time.monotonic()
            except (FlyteSystemException, FlyteTimeout):
                if time.monotonic() - self.answered > AWAY_SECONDS:
                    click.echo("the execution may well go on", err=True)
                    raise
                self.print_if_new("cluster", "the cluster does not answer; the execution may well go on")
            if self.execution.is_done:
                return
            time.sleep(min(PAUSE_SECONDS, 1 + (time.monotonic() - self.began) / 30))

    def iterate_nodes(self, parent: str | None = None) -> Iterator[Any]:
        """Yield the nodes that have begun, below a parent node or the workflow, recursively."""
        for node in iterate_node_executions(self.client, self.execution.id, unique_parent_id=parent):
            if not node.id.node_id.endswith(("start-node", "end-node")):
                yield node
                if node.metadata.is_parent_node:
                    yield from self.iterate_nodes(node.id.node_id)

    def print_changes(self, node: Any) -> None:
        """Print what is new of a node: phase and error of each attempt."""
        name = self.names.get(node.id.node_id, node.id.node_id).rpartition(".")[2]
        for attempt in iterate_task_executions(self.client, node.id):
            name = attempt.id.task_id.name.rpartition(".")[2]
            phase = TaskExecutionPhase.enum_to_string(attempt.closure.phase)
            error = f": {extract_sentence(attempt.closure.error.message)}" if attempt.closure.error else ""
            number = attempt.id.retry_attempt
            self.print_if_new((node.id.node_id, number), f"{name}, attempt {number + 1}: {phase}{error}")
        metadata = node.closure.task_node_metadata
        if metadata is not None and metadata.cache_status == CACHE_HIT:
            self.print_if_new(node.id.node_id, f"{name}: SUCCEEDED, from the cache")

    def print_if_new(self, topic: object, line: str) -> None:
        if self.printed.get(topic) != line:
            click.echo(f"{time.strftime('%H:%M:%S')} {line}")
        self.printed[topic] = line


def extract_sentence(message: str) -> str:
    """Return the message of a task's error, without traceback and prefixes."""
    _, mark, text = message.rpartition("\nMessage:\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [message]
    return ERROR_PREFIX.sub("", lines[0 if mark else -1]).partition(", cause=")[0]


def download_outputs(remote: FlyteRemote, outputs: dict[str, Any], folder: Path) -> None:
    """Download all of FILES or none, from addresses that the cluster signs, so that no key of its store is needed."""
    with ExitStack() as files:
        for output, name in FILES.items():
            address = outputs[output].scalar.blob.uri
            signed = remote.client.get_download_signed_url(address).signed_url
            file = files.enter_context(replace_file(folder / name))
            try:
                storage.retry(signed, partial(storage.download_file, file=file))
            except storage.UnavailableError as error:
                server = signed.partition("://")[2].partition("/")[0]
                raise UserError(
                    f"{name} cannot be downloaded from {server}: {error}; fetch {address} yourself"
                ) from None


if __name__ == "__main__":
    # flytekit's own handler would end the process without a message.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch()
