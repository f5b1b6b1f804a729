"""Size of layout.json, and the time in which a rank reads and checks it: 70B under FSDP, at 512 and 4,096 ranks.

Each rank's share is described by arithmetic, as `engines/fsdp.py` shards rows. The bars are 5 MB and 0.3 s at 512
ranks, and 10 MB at 4,096. Version 2 listed each slice and the checksum of each MiB: 203 MB, 9 s and 2 GB of memory at
512 ranks.

    python benchmarks/layout_json.py [--rounds 5]
"""

import argparse
import time
from pathlib import Path

import torch

from megatron_lite.checkpoint.contents import describe, join
from megatron_lite.checkpoint.layout import FileInfo, Layout, dump_layout, parse_layout
from megatron_lite.config.schema import Config
from megatron_lite.convert.recipe import full_table
from megatron_lite.ddp.local_shard import LocalShard
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid

KINDS = {"weight": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def layout_of_70b(dp: int) -> Layout:
    """The layout of a checkpoint of this number of ranks."""
    config = Config.model_validate({"model": {"preset": "llama-3.1-70b"}, "parallel": {"ddp": "fsdp"}})
    table, tensors, files = full_table(config.model), [], {}
    for rank in range(dp):
        ctx, shards = ParallelContext.at(Grid(dp=dp), rank), {}
        for name, meta in table.items():
            row = meta.shape[1] if len(meta.shape) > 1 else 1
            rows = -(-meta.shape[0] // dp)
            count = min(rows, meta.shape[0] - rank * rows) * row
            if count > 0 and rank < 2:  # later ranks describe nothing and have the files of rank 1
                shards[name] = {
                    kind: LocalShard(
                        torch.empty(count, dtype=dtype, device="meta"), rank * rows * row, "sharded", rows * row
                    )
                    for kind, dtype in KINDS.items()
                }
        described = describe(ctx, table, shards)
        tensors.append(described.tensors)
        names = [f"mp_rank_00/{stem}_dp_{rank:03d}" for stem in ("model", "optimizer")]
        names += [f"mp_rank_00/rng_host_{rank:05d}"] * (rank % 8 == 0)
        files |= {f"{name}.safetensors": FileInfo(bytes=10**9 + rank, header_crc32=f"{rank:08x}") for name in names}
    return Layout(
        iteration=1000,
        saved_at="2025-01-01T00:00:00+00:00",
        grid=Grid(dp=dp),
        state={},
        config=config.model_dump(mode="json"),
        tensors=join(tensors),
        files=files,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for dp in (512, 4096):
        text = dump_layout(layout_of_70b(dp)).encode()
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            parse_layout(text, Path("layout.json"))
            seconds.append(time.perf_counter() - started)
        times = f"minimum {min(seconds):.3f} s, median {sorted(seconds)[rounds // 2]:.3f} s"
        print(f"{dp:5,} ranks   {len(text) / 1e6:6.2f} MB   read and checked in {times}")


if __name__ == "__main__":
    main()
