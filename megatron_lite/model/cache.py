"""A cache of keys and values, so that generation computes each token once.

The keys and values of a token do not change when later tokens follow, because attention is causal. So a new token needs
only its own query, and the stored keys and values of all earlier tokens.
"""

import torch
from torch import Tensor

from megatron_lite.model.core_attention import Attention, math_attention


class KeyValueCache:
    """The keys and values of one `ParallelAttention` on this rank: room for `capacity` tokens of each text.

    The texts of a batch can have unequal lengths. The first call has all prompts, padded at the end. Each later one has
    one new token of each text, at the columns `at`; it replaces padding there.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.at: Tensor | None = None  # int64 [b]; None: the first call
        self.num_columns = 0  # that hold tokens of some text

    def attend(
        self, attend: Attention, query: Tensor, key: Tensor, value: Tensor, **options
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to the stored tokens and the new ones. Shapes and options as of `Attention`.

        `attend` computes the first call. Later ones have a `Mask.part` of one query for each text.
        """
        if self.at is None:
            b, g, s, d = key.shape
            # Masked columns have probability 0, and 0 times a nan in unused memory would be nan.
            self.key, self.value = (x.new_zeros(b, g, self.capacity, d) for x in (key, value))
            self.key[:, :, :s], self.value[:, :, :s] = key, value
            return attend(query, key, value, **options)
        rows = torch.arange(len(key), device=key.device)
        self.key[rows, :, self.at], self.value[rows, :, self.at] = key[:, :, 0], value[:, :, 0]
        stored = self.key[:, :, : self.num_columns], self.value[:, :, : self.num_columns]
        # One query needs no s x s scores. The heads of a group take the place of queries, so no key is copied for each.
        out, lse = math_attention(query[:, :, 0].unflatten(1, (key.shape[1], -1)), *stored, **options)
        return out.flatten(1, 2)[:, :, None], lse
