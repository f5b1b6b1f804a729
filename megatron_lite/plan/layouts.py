"""A layout as a value: the fields of a config that a search varies."""

from dataclasses import dataclass
from typing import Any, get_args

from megatron_lite.config.schema import Config, ParallelConfig
from megatron_lite.config.yaml_file import show_value

ENGINES = {
    **{name: {"ddp": name, "distributed": False} for name in get_args(ParallelConfig.model_fields["ddp"].annotation)},
    "zero1": {"ddp": "local", "distributed": True},
}


@dataclass(frozen=True)
class Layout:
    """What a search varies."""

    tensor: int
    context: int
    pipeline: int
    virtual: int
    schedule: str
    stages: str | tuple[int, ...]
    micro_batch: int
    recompute: str
    sequence: bool
    engine: str
    shard: int = 0  # ranks that share a copy with zero1 and fsdp; 0: all

    def fields(self) -> dict[str, dict[str, Any]]:
        """The fields of a config by section."""
        engine = ENGINES[self.engine]
        return {
            "parallel": {
                "tensor": self.tensor,
                "sequence": self.sequence,
                "context": self.context,
                "pipeline": self.pipeline,
                "virtual_pipeline": self.virtual,
                "schedule": self.schedule,
                "pipeline_layout": self.stages,
                "ddp": engine["ddp"],
                "fsdp_shard": self.shard if self.engine == "fsdp" else 0,
            },
            "optim": {
                "distributed": engine["distributed"],
                "distributed_shard": self.shard if self.engine == "zero1" else 0,
            },
            "train": {"micro_batch_size": self.micro_batch, "recompute": self.recompute},
        }

    def overrides(self) -> list[str]:
        """The fields as on a command line."""
        return [
            f"{section}.{name}={value if isinstance(value, str) else show_value(value).replace(' ', '')}"
            for section, fields in self.fields().items()
            for name, value in fields.items()
        ]

    def applied(self, config: Config) -> Config:
        """The config with this layout."""
        sections = {name: getattr(config, name).model_copy(update=fields) for name, fields in self.fields().items()}
        return config.model_copy(update=sections)


def sharding(config: Config, engine: str, ranks: int) -> str:
    """What an engine shards over so many ranks: what `local`, `zero1` or `fsdp` does."""
    if engine == "fsdp" and ranks == 1:
        return "local"
    if engine == "deepspeed":
        return ("local", "zero1", "zero1", "fsdp")[config.deepspeed.zero_stage]
    return engine if engine in ("zero1", "fsdp") else "local"


def layout_of(config: Config) -> Layout:
    """The layout of a config."""
    parallel = config.parallel
    return Layout(
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual_pipeline,
        schedule=parallel.schedule,
        stages=parallel.pipeline_layout,
        micro_batch=config.train.micro_batch_size,
        recompute=config.train.recompute,
        sequence=parallel.sequence,
        engine="zero1" if parallel.ddp == "local" and config.optim.distributed else parallel.ddp,
        shard=config.shard_size,
    )


def changes(config: Config, layout: Layout) -> list[str]:
    """The overrides that give a config this layout."""
    given = [getattr(getattr(config, section), name) for section, fields in layout.fields().items() for name in fields]
    values = [value for fields in layout.fields().values() for value in fields.values()]
    return [text for text, old, new in zip(layout.overrides(), given, values, strict=True) if old != new]
