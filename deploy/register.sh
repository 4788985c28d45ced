#!/usr/bin/env bash
# Registers this commit's tasks, workflows and launch plans, with all sources. Schedules start only with --activate.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: deploy/register.sh --config FILE --image IMAGE --profile PROFILE [--project NAME] [--domain NAME]
                          [--service-account NAME] [--sources-in-image] [--activate] [--dry-run]

  --config FILE        cluster to register on: deploy/sandbox.yaml, deploy/production.yaml or your own
  --image IMAGE        image of the pods, built from Dockerfile, with a tag
  --profile PROFILE    resources of the training pod: a name in flyte_ddp/pods/profiles.py (gpu, gpu-a100, sandbox, local)
  --project, --domain  project and domain in Flyte (flytesnacks, development)
  --service-account    the Kubernetes service account of pods that launch plans start (the namespace's default one)
  --sources-in-image   send no sources: the image was built from this commit with --target with-sources
  --activate           activate this version's launch plans: their schedules start, those of other versions stop
  --dry-run            contact no cluster; write the package to build/, and list the launch plans, also skipped ones

Read from the environment: FLYTE_DDP_NOTIFY, FLYTE_DDP_WANDB_SECRET, WANDB_PROJECT and others (docs/configuration.md).
TEXT
}

fail() {
    printf 'Error: %s\n' "$*" >&2
    exit 1
}

config="" image="" profile="" project=flytesnacks domain=development service_account="" copy=all activate="" dry_run=""
while [ $# -gt 0 ]; do
    case $1 in
        --config | --image | --profile | --project | --domain | --service-account)
            [ -n "${2:-}" ] || fail "$1: a value must follow; see deploy/register.sh --help"
            option=${1#--}
            printf -v "${option//-/_}" %s "$2"
            shift 2
            ;;
        --sources-in-image) copy=none && shift ;;
        --activate) activate=yes && shift ;;
        --dry-run) dry_run=yes && shift ;;
        --help | -h) usage && exit ;;
        *) fail "unknown argument '$1': see deploy/register.sh --help" ;;
    esac
done
for name in config image profile; do
    [ -n "${!name}" ] || fail "--$name is missing: it has no default, so that nothing is registered by mistake; add --$name"
done
[ -f "$config" ] || fail "--config $config: file does not exist; choose deploy/sandbox.yaml or deploy/production.yaml"
if placeholder=$(grep -oE '^[^#]*endpoint:.*example\.(com|org|net)' "$config"); then
    placeholder=${placeholder%%$'\n'*}
    fail "--config $config: '${placeholder#"${placeholder%%[! ]*}"}' is an example: put your cluster's address there"
fi
[[ $image =~ ^[^[:space:]]+(:[^:/[:space:]]+|@sha256:[0-9a-f]{64})$ ]] ||
    fail "--image '$image': must end with a tag or a digest, such as registry.example.com/flyte-ddp:1"
config=$(realpath "$config")

cd "$(dirname "$0")/.."
changes=$(git status --porcelain --untracked-files=all) ||
    fail "$PWD is not a git clone: the version registered is the commit's; clone the repository"
[ -z "$changes" ] ||
    fail "the working tree differs from its commit: a registered version must match a commit;" \
        "commit, stash or remove"$'\n'"$changes"

export FLYTE_DDP_PROFILE=$profile
pyflyte=pyflyte
[ ! -x .venv/bin/pyflyte ] || pyflyte=.venv/bin/pyflyte
command -v "$pyflyte" >/dev/null || fail "pyflyte, which registers workflows, is not installed; run make install"
python=$(dirname "$(command -v "$pyflyte")")/python

# Flyte silently ignores a registration under an existing version. Therefore the version contains everything that is
# registered: the commit, the profile, and a digest of image, account and settings of tasks and launch plans.
settings=$("$python" -m flyte_ddp.pods.environment) # no secrets; prints variables that are unknown or not sent
digest=$(printf '%s\n' "$image" "$copy" "$service_account" "$settings" | git hash-object --stdin | cut -c1-6)
version=$(git describe --tags --always --abbrev=12)-$profile-$digest

register=("$pyflyte" --config "$config" register --project "$project" --domain "$domain" --image "$image"
    --version "$version" --copy "$copy" ${service_account:+--service-account "$service_account"}
    ${activate:+--activate-launchplans} workflows)
package=("$pyflyte" --pkgs workflows package --image "$image" --copy "$copy" --force
    --output "build/flyte-package-$version.tgz")

schedules="Schedules are unchanged: add --activate to start those of this version, and to stop those of older versions."
[ -z "$activate" ] || schedules="With --activate the schedules of this version start, and those of older versions stop."

printf 'commit   %s\nversion  %s\nprofile  %s\nimage    %s\ncluster  %s (%s, %s)\n' \
    "$(git log -1 --format='%h %s')" "$version" "$profile" "$image" "$config" "$project" "$domain"
if [ -n "$dry_run" ]; then
    mkdir -p build
    printf '\nDry run: packages only. To register: '
    mapfile -t pairs < <(printf '%s' "${settings:+$settings$'\n'}")
    printf '%q ' env "FLYTE_DDP_PROFILE=$profile" "${pairs[@]}" "${register[@]}"
    printf '\n\n'
    "${package[@]}"
    printf '\n'
    "$python" -m workflows.schedules
    printf '\n%s\n' "$schedules"
    exit
fi
"${register[@]}"
printf '%s\n' "$schedules"
