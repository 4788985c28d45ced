# The image of every task: Python and the locked dependencies. Sources come with each registration (deploy/register.sh),
# or are baked in where that is wanted: docker build --target with-sources .
#
# A slim Python is enough for GPUs: torch's own wheels bring CUDA, cuDNN and NCCL in the versions it was built with, and
# the node's container runtime adds the driver's libraries. A CUDA base image would hold most of that a second time.
FROM python:3.12.12-slim-bookworm AS dependencies

# torch.compile builds its kernels when it runs, and needs a compiler for that on GPUs too. Debian removes superseded
# versions from its mirrors, so a pinned one would break the build. KubeRay asks by wget whether its pods are well; without
# it none ever is, and no rank starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*

# The lock file is mounted, not copied: this layer is made anew only when it changes, and what was downloaded for the
# last one is still in the cache (also a mount, so hadolint's rule against caches in layers does not apply). pip compiles
# to bytecode, which the user below could not save in this place. Older buildah and podman (1.28) overlook that the file
# has changed (buildah's issue 5400): give them --no-cache.
# For Flyte 2: --build-arg LOCK=requirements-flyte2.lock
ARG LOCK=requirements.lock
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=bind,source=requirements.lock,target=/tmp/requirements.lock \
    --mount=type=bind,source=requirements-flyte2.lock,target=/tmp/requirements-flyte2.lock \
    pip install --cache-dir /var/cache/pip --no-deps --require-hashes --root-user-action ignore \
        --requirement "/tmp/$LOCK"

# Flyte's plugin for Dask starts these two, which Dask has replaced by `dask scheduler` and `dask worker`.
RUN for name in scheduler worker; do \
        printf '#!/bin/sh\nexec dask %s "$@"\n' $name > /usr/local/bin/dask-$name && chmod +x /usr/local/bin/dask-$name; \
    done

# Not root, but at home in /root: that is where flytekit unpacks registered sources unless told otherwise.
RUN useradd --uid 1000 --user-group --home-dir /root --no-create-home flyte && chown flyte:flyte /root
WORKDIR /root
# Ranks are processes of their own, so what they import must be found through the environment.
ENV PYTHONPATH=/root PYTHONUNBUFFERED=1 FLYTE_DISABLE_SENTRY=true
# As numbers, because Kubernetes can check runAsNonRoot with these only.
USER 1000:1000

FROM dependencies AS with-sources
# Not in /root, which is hidden where pods have a folder of their own there (deploy/pod-template-read-only.yaml).
WORKDIR /sources
ENV PYTHONPATH=/sources
COPY --chown=1000:1000 flyte_ddp flyte_ddp
COPY --chown=1000:1000 flytekitplugins flytekitplugins
COPY --chown=1000:1000 flyteplugins flyteplugins
COPY --chown=1000:1000 tasks tasks
COPY --chown=1000:1000 workflows workflows
COPY --chown=1000:1000 flyte2 flyte2
COPY --chown=1000:1000 config config

# The last stage is what is built when none is named.
FROM dependencies
