# make docker                    megatron-lite:cpu
# make docker DEVICE=cuda        megatron-lite:cuda, for NVIDIA drivers from 580 on
#
# docker run --rm -v megatron-runs:/megatron_lite/runs megatron-lite:cpu make quickstart
# docker run --rm -v megatron-runs:/megatron_lite/runs -v /my/data:/megatron_lite/data:ro --gpus all --ipc host \
#     megatron-lite:cuda megatron-lite pretrain --config configs/gpt.yaml ...
#
# Runs are written to the volume; a folder of yours in its place must be writable for user 1000. NCCL wants the shared
# memory of --ipc host. A stopped run saves first: docker stop --time 600.
FROM python:3.12-slim-trixie

# g++ is for what torch and DeepSpeed compile when they first need it; Triton wants the gcc that comes with it. tini
# passes a stop on to commands that, as process 1, would not hear it.
# No versions: Debian's mirrors drop a package's old one with each update, and the tag above names the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home megatron \
    && install --directory --owner megatron --group megatron /megatron_lite/runs

WORKDIR /megatron_lite
# What make and pip read, and nothing that a change to the sources touches: pip looks for a package to point at and for
# the text that a package index would show, and empty ones do for both.
COPY Makefile pyproject.toml constraints.txt LICENSE ./
ARG DEVICE=cpu
# constraints.txt pins torch without +cpu or +cu130, so both satisfy it, and pip prefers them to PyPI's build. It only
# warns when the index cannot be reached, hence the look at what was installed.
RUN case $DEVICE in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index=https://download.pytorch.org/whl/cu130 ;; \
        *) echo "DEVICE is '$DEVICE'; it wants cpu or cuda" >&2; exit 2 ;; \
    esac \
    && mkdir megatron_lite && touch megatron_lite/__init__.py README.md \
    && PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=$index make .venv/.installed-base \
    && .venv/bin/python -c "import torch; assert torch.__version__.endswith('+${index##*/}'), torch.__version__"

# The installation points here, so the sources are not installed. pyproject.toml and constraints.txt must not come again:
# newer than the installation, they would make `make quickstart` install once more.
COPY README.md launch.sh ./
COPY configs configs
COPY tools tools
COPY megatron_lite megatron_lite
# A checkout made under a strict umask is for its owner only, who is root here.
RUN chmod -R a+rX Makefile README.md launch.sh configs tools megatron_lite \
    && .venv/bin/python -m compileall -q megatron_lite \
    && .venv/bin/megatron-lite --help >/dev/null

USER 1000
ENV PATH=/megatron_lite/.venv/bin:$PATH
ENTRYPOINT ["tini", "--"]
CMD ["megatron-lite", "--help"]
