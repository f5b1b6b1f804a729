"""`python -m megatron_lite.launch`: launch.sh of this package, which starts `pretrain` with this interpreter."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["PYTHON"] = sys.executable
    os.execvp("sh", ["sh", str(Path(__file__).with_name("launch.sh")), *sys.argv[1:]])
