#!/bin/sh
# Pretrains with the Python of this checkout's .venv, if it exists and PYTHON is not set: see ./launch.sh --help
set -eu

here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${PYTHON:-}" ] && [ -x "$here/.venv/bin/python" ]; then export PYTHON="$here/.venv/bin/python"; fi
exec sh "$here/megatron_lite/launch/launch.sh" "$@"
