# make docker                    megatron-lite:cpu
# make docker DEVICE=cuda        megatron-lite:cuda, for NVIDIA drivers from 580 on
#
# docker run --rm -v megatron-runs:/megatron_lite/runs megatron-lite:cpu make quickstart
# docker run --rm -v megatron-runs:/megatron_lite/runs -v /my/data:/megatron_lite/data:ro --gpus all --ipc host \
#     --network host --device /dev/infiniband --ulimit memlock=-1 --cap-add IPC_LOCK \
#     megatron-lite:cuda megatron-lite pretrain --config configs/gpt.yaml ...
#
# The second line is for several machines with InfiniBand or RoCE: without it, NCCL uses TCP and does not say so.
# Runs are written to the volume. A mounted folder in its place must be writable for user 1000. NCCL needs the shared
# memory of --ipc host. A stopped run saves a checkpoint: docker stop --time 600.
FROM python:3.12-slim-trixie

# NCCL opens the libraries of RDMA at run time. torch and DeepSpeed compile some code at run time with g++; Triton needs gcc, which g++ installs. tini forwards
# signals: as process 1, a command without a handler would ignore a stop.
# Packages have no versions, because Debian's mirrors drop old versions. The tag above names the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ ibverbs-providers libibverbs1 librdmacm1 make tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home megatron \
    && install --directory --owner megatron --group megatron /megatron_lite/runs

WORKDIR /megatron_lite
# Only the files that make and pip need, so a change to the sources does not repeat the installation. pip also needs a
# package and a README; empty files are enough.
COPY Makefile pyproject.toml constraints.txt LICENSE NOTICE ./
ARG DEVICE=cpu
# constraints.txt pins torch without +cpu or +cu130, so both builds satisfy it, and pip prefers them to PyPI's build. If
# the index cannot be reached, pip only warns, so the installed version is checked.
RUN case $DEVICE in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index=https://download.pytorch.org/whl/cu130 ;; \
        *) echo "DEVICE is '$DEVICE'; it wants cpu or cuda" >&2; exit 2 ;; \
    esac \
    && mkdir megatron_lite && touch megatron_lite/__init__.py README.md \
    && PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=$index make .venv/.installed-base \
    && .venv/bin/python -c "import torch; assert torch.__version__.endswith('+${index##*/}'), torch.__version__"

# The installation points to this folder, so the sources need no installation. Copies of pyproject.toml and
# constraints.txt would be newer than the installation, and `make quickstart` would repeat it.
COPY README.md launch.sh ./
COPY configs configs
COPY tools tools
COPY megatron_lite megatron_lite
# After a checkout with a strict umask, only root could read the files.
RUN chmod -R a+rX Makefile README.md launch.sh configs tools megatron_lite \
    && .venv/bin/python -m compileall -q megatron_lite \
    && .venv/bin/megatron-lite --help >/dev/null

USER 1000
ENV PATH=/megatron_lite/.venv/bin:$PATH
ENTRYPOINT ["tini", "--"]
CMD ["megatron-lite", "--help"]
