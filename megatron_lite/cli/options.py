"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="Win over the file: optim.lr=3e-4")
]
Model = Annotated[
    str, typer.Option("--model", metavar="FILE.py:NAME", help="What builds a custom model, called like get_model.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A YAML file, such as configs/gpt.yaml.")
]
NprocPerNode = Annotated[
    int | None, typer.Option("--nproc-per-node", min=1, metavar="N", help="Start N ranks on this machine.")
]
Nnodes = Annotated[
    str | None, typer.Option("--nnodes", metavar="N|MIN:MAX", help="Machines; a range goes on when some come or go.")
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, metavar="N", help="Which of them this is; 0 is --master-addr.")
]
MasterAddr = Annotated[
    str | None, typer.Option("--master-addr", metavar="HOST", help="The first machine, as the others reach it.")
]
MasterPort = Annotated[
    int | None, typer.Option("--master-port", min=1, max=65535, metavar="N", help="Where they meet; 29500.")
]
JoinTimeout = Annotated[
    float, typer.Option("--join-timeout", min=1, metavar="SECONDS", help="How long to wait for other machines.")
]
