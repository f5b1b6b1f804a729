"""A stack of transformer blocks with its final norm: an encoder or a decoder, or what a pipeline stage has of it."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.model.block import TransformerBlock, Unadded
from megatron_lite.model.masks import CAUSAL, FULL, Mask
from megatron_lite.model.norms import build_norm
from megatron_lite.model.options import LayerOptions
from megatron_lite.model.rotary import RotaryTable
from megatron_lite.parallel.recompute import recompute

MAX_TABLE = 1 << 20  # angles of more positions are computed up to the largest one in use, which a GPU is asked for
Rotation = tuple[Tensor, Tensor]
"""Cosine and sine."""


class TransformerStack(nn.Module):
    """The blocks with the numbers `layers` of one stack, and on request its final norm and its top-query block.

    `first_place` is the number of blocks before them on this stage. With `cross_attention` the blocks are those of a
    decoder that sees an encoder's output.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        options: LayerOptions,
        *,
        final_norm: bool,
        top_query: bool = False,
        first_place: int = 0,
        cross_attention: bool = False,
    ):
        super().__init__()
        self.options, self.max_positions = options, config.max_position_embeddings
        common = {"cross_attention": cross_attention}
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerBlock(config, options, place=place, number=number, **common)
                for place, number in enumerate(layers, start=first_place)
            }
        )
        has_norm = final_norm and config.norm_placement != "post"  # whose blocks end with a norm
        self.final_layernorm = build_norm(config, options) if has_norm else None
        self.top_query_layer = None
        if top_query:
            self.top_query_layer = TransformerBlock(
                config, options, place=len(self.layers), number=config.num_layers, separate_query=True
            )
        kinds = {block.rotary for block in self.layers.values()} - {""}  # type: ignore[attr-defined]
        self.rotary = {kind: RotaryTable(config, local=kind == "local") for kind in sorted(kinds)}  # type: ignore[type-var]

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask = CAUSAL,
        bias: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask = FULL,
        top_queries: Tensor | None = None,
    ) -> Tensor:
        """The stream `[s', b, h]` after these blocks; after a final norm in the weights' dtype. Other arguments as of
        `TransformerBlock`; `position_ids` [b, s] or [1, s], None: 0..s-1; `top_queries` of `TopQueryEmbeddings`."""
        rotary = self._rotary(x, position_ids)
        common = {"mask": mask, "bias": bias, "memory": memory, "memory_mask": memory_mask}
        blocks: list[TransformerBlock] = list(self.layers.values())  # type: ignore[arg-type]
        size = self.options.recompute_group
        if size:
            for start in range(0, len(blocks), size):
                x = recompute(_run, blocks[start : start + size], x, rotary, common, rng=self.options.rng)
        else:
            x = _run(blocks, x, rotary, common)
        if self.final_layernorm is not None:
            x = self.final_layernorm(x)
        if (top := self.top_query_layer) is not None:
            x = top.added(top(x, query_input=top_queries, mask=mask)).to(self.options.dtype)
        return x

    def _rotary(self, x: Tensor, position_ids: Tensor | None) -> dict[str, Rotation]:
        """Cosine and sine of the tokens' positions, for each kind of rotation in these blocks."""
        length = x.shape[0] * self.options.sequence.size
        memory = {"device": x.device, "dtype": x.dtype}
        if position_ids is None:
            return {kind: table(length, **memory) for kind, table in self.rotary.items()}
        found, end = {}, self.max_positions
        if end > MAX_TABLE and x.device.type != "meta":
            end = 1 << int(position_ids.max()).bit_length()
        for kind, table in self.rotary.items():
            cos, sin = table(end, extent=length * self.options.context.size, **memory)
            found[kind] = cos[position_ids.t()].squeeze(2), sin[position_ids.t()].squeeze(2)
        return found


def _run(blocks: Sequence[TransformerBlock], x: Tensor, rotary: dict[str, Rotation], common: dict[str, Any]) -> Tensor:
    stream: Tensor | Unadded = x
    for block in blocks:
        stream = block(stream, rotary=rotary.get(block.rotary), **common)
    return blocks[-1].added(stream) if isinstance(stream, Unadded) else stream
