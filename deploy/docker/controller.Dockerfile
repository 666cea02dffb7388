# The controller and eelctl.
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/docker/controller.Dockerfile -t eelgrid-controller:0.2.0 .
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
COPY deploy/docker/requirements-controller.lock requirements-build.lock ./
RUN python -m venv /opt/eelgrid && \
    /opt/eelgrid/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements-controller.lock
COPY pyproject.toml README.md LICENSE ./
COPY agent ./agent
COPY client ./client
COPY controller ./controller
COPY kernels ./kernels
COPY protos ./protos
RUN python -m venv /tmp/tools && /tmp/tools/bin/pip install --no-cache-dir --disable-pip-version-check \
      --require-hashes -r requirements-build.lock && \
    /tmp/tools/bin/python -m hatchling build -t wheel -d /tmp/wheel && \
    /opt/eelgrid/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-index /tmp/wheel/*.whl && \
    rm -rf /opt/eelgrid/lib/python3.13/site-packages/eelgrid /opt/eelgrid/lib/python3.13/site-packages/eelgrid_agent /opt/eelgrid/bin/eelgrid-agent \
           /opt/eelgrid/lib/python3.13/site-packages/pip* && \
    find /opt/eelgrid -name '*.py' -exec touch -d @1700000000 {} + && \
    /opt/eelgrid/bin/python -m compileall -q /opt/eelgrid && \
    EELGRID_PORTABLE_KERNELS=1 /opt/eelgrid/bin/python -m eelgrid_kernels

FROM ${BASE}
COPY --from=build /opt/eelgrid /opt/eelgrid
# The image brings kernels for x86-64-v3 and arm64 along; a first start copies them into this volume. Older processors, and
# EELGRID_PORTABLE_KERNELS=0, compile them there for the machine at hand. numba knows a kernel by the time of its source, of
# which an image's layer keeps whole seconds: hence the touch above.
ENV PATH=/opt/eelgrid/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/eelgrid NUMBA_CACHE_DIR=/var/cache/eelgrid EELGRID_PORTABLE_KERNELS=1
RUN install -d -o 65532 -g 65532 /var/cache/eelgrid /var/lib/eelgrid
VOLUME ["/var/cache/eelgrid", "/var/lib/eelgrid"]
USER 65532:65532
EXPOSE 7443 9464
ENTRYPOINT ["eelgrid-controller"]
