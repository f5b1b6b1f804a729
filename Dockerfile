# docker build -t megatron-lite .
# docker run --rm megatron-lite make quickstart
# With GPUs: docker run --rm --gpus all --ipc host megatron-lite megatron-lite pretrain --config configs/gpt.yaml ...
FROM python:3.12-slim

# The CPU build of torch by default; --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# DeepSpeed compiles its operators on first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megatron_lite
COPY . .
RUN PIP_EXTRA_INDEX_URL=${TORCH_INDEX} make .venv/.installed-base
ENV PATH=/megatron_lite/.venv/bin:$PATH
CMD ["megatron-lite", "--help"]
