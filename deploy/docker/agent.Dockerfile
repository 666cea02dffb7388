# The agent: Python, what it imports, itself. No numpy, no numba, no compiler.
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/docker/agent.Dockerfile -t eelgrid-agent:0.2.0 .
#
# For a release give the base by its digest, which names its bytes: look it up (docker buildx imagetools inspect
# python:3.13-slim-bookworm) and add --build-arg BASE=python:3.13-slim-bookworm@sha256:DIGEST --build-arg RELEASE=1.
# With RELEASE=1 a base that is named by a tag alone is refused, for a tag may be another image tomorrow.
ARG BASE=python:3.13-slim-bookworm
FROM ${BASE} AS build
ARG BASE
ARG RELEASE=
RUN test -z "${RELEASE}" || echo "${BASE}" | grep -Eq '@sha256:[0-9a-f]{64}$' || { \
      echo "RELEASE=${RELEASE} needs --build-arg BASE=NAME@sha256:DIGEST; ${BASE} is named by a tag alone" >&2; exit 1; }
WORKDIR /source
COPY deploy/docker/requirements-agent.lock requirements-build.lock ./
RUN python -m venv /opt/eelgrid && \
    /opt/eelgrid/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements-agent.lock
COPY pyproject.toml README.md LICENSE ./
COPY agent ./agent
COPY client ./client
COPY controller ./controller
COPY kernels ./kernels
COPY protos ./protos
# One wheel for both images; the other daemon's modules go, so that nothing here can import the optimizer.
RUN python -m venv /tmp/tools && /tmp/tools/bin/pip install --no-cache-dir --disable-pip-version-check \
      --require-hashes -r requirements-build.lock && \
    /tmp/tools/bin/python -m hatchling build -t wheel -d /tmp/wheel && \
    /opt/eelgrid/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-index /tmp/wheel/*.whl && \
    rm -rf /opt/eelgrid/lib/python3.13/site-packages/eelgrid /opt/eelgrid/lib/python3.13/site-packages/eelgrid_controller /opt/eelgrid/lib/python3.13/site-packages/eelgrid_kernels \
           /opt/eelgrid/bin/eelctl /opt/eelgrid/bin/eelgrid-controller /opt/eelgrid/bin/kubectl-eelgrid \
           /opt/eelgrid/lib/python3.13/site-packages/pip* && \
    /opt/eelgrid/bin/python -m compileall -q /opt/eelgrid

FROM ${BASE}
COPY --from=build /opt/eelgrid /opt/eelgrid
ENV PATH=/opt/eelgrid/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Levels that need root say so in the pod; the image itself is nobody's.
USER 65532:65532
ENTRYPOINT ["eelgrid-agent"]
