"""A layout as a value: the fields of a config that a search varies."""

from dataclasses import dataclass

from megatron_lite.config.schema import Config

ENGINES = {
    "local": {"ddp": "local", "distributed": False},
    "zero1": {"ddp": "local", "distributed": True},
    "fsdp": {"ddp": "fsdp", "distributed": False},
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

    def overrides(self) -> list[str]:
        """The fields of a config, as on a command line."""
        engine = ENGINES[self.engine]
        stages = self.stages if isinstance(self.stages, str) else f"[{','.join(map(str, self.stages))}]"
        values = {
            "parallel.tensor": self.tensor,
            "parallel.sequence": str(self.sequence).lower(),
            "parallel.context": self.context,
            "parallel.pipeline": self.pipeline,
            "parallel.virtual_pipeline": self.virtual,
            "parallel.schedule": self.schedule,
            "parallel.pipeline_layout": stages,
            "parallel.ddp": engine["ddp"],
            "optim.distributed": str(engine["distributed"]).lower(),
            "train.micro_batch_size": self.micro_batch,
            "train.recompute": self.recompute,
        }
        return [f"{name}={value}" for name, value in values.items()]

    def applied(self, config: Config) -> Config:
        """The config with this layout."""
        engine = ENGINES[self.engine]
        parallel = {
            "tensor": self.tensor,
            "sequence": self.sequence,
            "context": self.context,
            "pipeline": self.pipeline,
            "virtual_pipeline": self.virtual,
            "schedule": self.schedule,
            "pipeline_layout": self.stages,
            "ddp": engine["ddp"],
        }
        train = {"micro_batch_size": self.micro_batch, "recompute": self.recompute}
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "train": config.train.model_copy(update=train),
                "optim": config.optim.model_copy(update={"distributed": engine["distributed"]}),
            }
        )


def layout_of(config: Config) -> Layout:
    """The layout of a config; DeepSpeed counts as the engine that shards the same state."""
    parallel, stage = config.parallel, config.deepspeed.zero_stage
    engine = {"fsdp": "fsdp", "deepspeed": ("local", "zero1", "zero1", "fsdp")[stage]}.get(parallel.ddp, "local")
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
        engine="zero1" if engine == "local" and config.optim.distributed else engine,
    )


def changes(before: Layout, after: Layout) -> list[str]:
    """The overrides by which two layouts differ."""
    return [new for old, new in zip(before.overrides(), after.overrides(), strict=True) if old != new]
