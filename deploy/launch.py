"""Launch a registered launch plan from the terminal: see python deploy/launch.py --help."""

import re
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import yaml
from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline
from flytekit.configuration import Config
from flytekit.core.options import Options
from flytekit.exceptions.user import FlyteEntityNotExistException
from flytekit.interaction.click_types import JsonParamType
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.remote import FlyteLaunchPlan, FlyteRemote

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.pods.environment import FROM_SCRATCH_VARIABLE
from tasks.command_line import CALL_SECONDS, show_errors_in_panels

PAUSE_SECONDS = 5.0  # between two queries of an execution
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
def launch(*, name: str, hp: Hyperparameters | None, config: str, version: str | None, **options: Any) -> None:
    """Launch the launch plan NAME, wait for the execution, and print the addresses of its outputs."""
    from_scratch = options["overwrite_cache"]
    remote = FlyteRemote(read_config(config), default_project=options["project"], default_domain=options["domain"])
    plan = fetch_launch_plan(remote, name, version)
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
        remote.wait(execution, poll_interval=timedelta(seconds=PAUSE_SECONDS), sync_nodes=False)
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
    outputs = execution.outputs.literals
    if (accuracies := outputs.get("epoch_accuracies")) and accuracies.collection.literals:
        last = accuracies.collection.literals[-1].scalar.primitive.value
        click.echo(f"main measure of the test split {last:.4g}")
    for output in sorted(outputs):
        scalar = outputs[output].scalar
        if scalar is not None and scalar.blob is not None:
            click.echo(f"  {output:12} {scalar.blob.uri}")
        elif scalar is not None and scalar.primitive is not None and scalar.primitive.string_value:
            click.echo(f"  {output:12} {scalar.primitive.string_value}")  # of a release: outcome, version, champion


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
        raise UserError(
            f"launch plan {name!r} {version or 'of any version'}: is not registered in domain {domain!r} of project "
            f"{project!r}; register with deploy/register.sh, or give another --version, --project or --domain"
        ) from None


def extract_sentence(message: str) -> str:
    """Return the message of a task's error, without traceback and prefixes."""
    _, mark, text = message.rpartition("\nMessage:\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [message]
    return ERROR_PREFIX.sub("", lines[0 if mark else -1]).partition(", cause=")[0]


if __name__ == "__main__":
    # flytekit's own handler would end the process without a message.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch()
