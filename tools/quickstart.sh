#!/bin/sh
# Trains a small CodeGeeX on the Python standard library's own source code, without any download.
# Each step is one megatron-lite command. Steps with existing output are skipped.
set -eu

config=${1:-configs/quickstart.yaml}
data=runs/quickstart/data
run=runs/quickstart
mlite="python -m megatron_lite"

# Two tensor-parallel processes; a single GPU takes one.
ranks=2
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 1 ]; then ranks=1; fi

mkdir -p "$data"
sources=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
if [ ! -e "$data/tokenizer.model" ]; then
    echo "1/4 training a BPE tokenizer of 4,096 tokens on $sources"
    $mlite train-tokenizer --input "$sources" --output-prefix "$data/tokenizer" --vocab-size 4096
fi
if [ ! -e "$data/stdlib_text_document.idx" ]; then
    echo "2/4 tokenizing the sources"
    $mlite preprocess --input "$sources" --output-prefix "$data/stdlib" \
        --tokenizer "sentencepiece:$data/tokenizer.model" --workers 2 --append-eod --language-tag
fi
if [ -e "$run/config.yaml" ]; then # a run resumes in its precision
    precision=$(sed -n 's/^ *precision: //p' "$run/config.yaml")
else
    precision=$(python -c 'from megatron_lite.training.throughput import faster_precision; print(faster_precision())')
fi
echo "3/4 training on $ranks process(es) in $precision"
set -- --config "$config" --nproc-per-node "$ranks" "parallel.tensor=$ranks" "train.precision=$precision"
$mlite pretrain "$@"
echo "4/4 writing some code"
prompt='def read_lines(path):
    """Return the lines of a file."""
'
$mlite generate --load "$run" --prompt "$prompt" --max-new-tokens 80 --temperature 0.7 --seed 1 --nproc-per-node "$ranks"
cat <<END

The run is in $run:
  metrics.jsonl    one line for every iteration
  tensorboard/     tensorboard --logdir $run/tensorboard
  checkpoints/     megatron-lite inspect $run
Next:
  megatron-lite pretrain $* train.iterations=720
  megatron-lite generate --load $run --prompt 'class Node:' --nproc-per-node $ranks
(\`. .venv/bin/activate\` adds the commands to your PATH)
END
