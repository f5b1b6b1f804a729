"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="Win over the file: optim.lr=3e-4")
]
TextInput = Annotated[
    list[Path],
    typer.Option(
        "--input",
        metavar="PATH...",
        help="JSON-lines files (also .gz, .zst), text or source files, or folders of them; several may follow.",
    ),
]
MoreInput = Annotated[list[Path] | None, typer.Argument(metavar="PATH", hidden=True)]  # of --input
JsonKey = Annotated[str, typer.Option("--json-key", metavar="KEY", help="The key of the text in a JSON line.")]
TokenizerSpec = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        metavar="SPEC",
        help="bytes, sentencepiece:FILE, gpt2:VOCAB,MERGES, hf:tokenizer.json or codegeex:FOLDER.",
    ),
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
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", min=0, metavar="N", help="Start failed ranks again, up to N times.")
]
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="FOLDER", help="Output of all ranks but the first, a file for each."),
]
