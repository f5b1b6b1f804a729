"""Attention in parts, as context-parallel ranks compute it, on one process."""

import torch
from torch import Tensor

from megatron_lite.model.attention_parts import PARTS, Sum
from megatron_lite.model.masks import Mask


def in_parts(name: str, tensors: list[Tensor], mask: Mask, owner: Tensor, **options: float) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of query, key and value; `owner` has the number of each key's part."""
    query, key, value, grad = (x.detach() for x in tensors)
    queries = torch.arange(query.shape[2], dtype=torch.int32)[None]
    places = [(owner == number).nonzero().flatten() for number in owner.unique()]
    total, masks = Sum(query), [mask.part(queries, place.int()) for place in places]
    for place, part in zip(places, masks, strict=True):
        total.add(*PARTS[name].forward(query, key[:, :, place], value[:, :, place], mask=part, **options))
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for place, part in zip(places, masks, strict=True):
        out = total.out.to(query.dtype)
        found = PARTS[name].backward(
            grad, query, key[:, :, place], value[:, :, place], out, total.lse, mask=part, **options
        )
        grads[0] += found[0].to(query.dtype)
        for full, share in zip(grads[1:], found[1:], strict=True):
            full[:, :, place] = share.to(query.dtype)
    return [total.out, total.lse, *grads]
