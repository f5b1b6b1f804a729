"""The model section of a config: sizes and kinds of a transformer."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from megatron_lite.config.presets import PRESETS
from megatron_lite.config.types import Bias, NonNegativeInt, Numbers, PositiveInt, Preset, Probability

# Logits are computed for a padded vocabulary whose size does not depend on the layout.
VOCAB_PADDING = 128


class Section(BaseModel):
    """One section of the YAML file: frozen, and strict about names and types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class ModelConfig(Section):
    """Sizes and kinds of the transformer; GPT, CodeGeeX, Llama, BERT and T5 are values of these fields.

    A size that is 0 by default follows from the fields that its text names.
    """

    preset: Preset = ""
    """Name of a preset, which sets all fields that are not given; `megatron-lite presets` lists them."""
    architecture: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """`decoder`: GPT, Llama; `encoder`: BERT; `encoder_decoder`: T5."""
    num_layers: PositiveInt = 12
    """Number of transformer blocks, without the top-query block; those of the decoder in an `encoder_decoder`."""
    num_encoder_layers: NonNegativeInt = 0
    """Number of blocks of the encoder in an `encoder_decoder`; 0: `num_layers`."""
    hidden_size: PositiveInt = 768
    """Width of the residual stream."""
    num_heads: PositiveInt = 12
    """Number of query heads."""
    num_query_groups: NonNegativeInt = 0
    """Number of key/value heads (grouped-query attention); 0: one for each query head. With fewer than
    `parallel.tensor`, ranks hold copies.
    """
    head_dim: NonNegativeInt = 0
    """Size of a head; 0: `hidden_size / num_heads`."""
    ffn_hidden_size: NonNegativeInt = 0
    """Width of the MLP; 0: `4 * hidden_size`, with a gate the multiple of 64 at or below 8/3 of `hidden_size`."""
    max_position_embeddings: PositiveInt = 1024
    """Largest number of positions; the size of the table of learned positions."""
    vocab_size: NonNegativeInt = 0
    """Number of tokens; 0: taken from `data.tokenizer`."""
    padded_vocab_size: NonNegativeInt = 0
    """Rows of the word embedding and of the head; 0: the next multiple of 128 from `vocab_size` on."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalization."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance (for `rmsnorm` to the mean square) before the square root."""
    norm_bias: bool = True
    """Biases of `layernorm`."""
    zero_centered_norm: bool = False
    """Norms multiply by 1 + weight, as in Gemma: Megatron's `--apply-layernorm-1p`."""
    norm_placement: Literal["pre", "post", "output", "sandwich"] = "pre"
    """Norms of a residual branch: `pre` before it, `output` after it, `sandwich` both; `post`: after the residual add,
    as in the original transformer, without a final norm.
    """
    residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
    """`parallel`: attention and MLP read the block's input, each after its norm, and are added to it together, as in
    GPT-NeoX; `parallel_shared_norm`: after one norm, as in GPT-J.
    """
    residual_scale: PositiveFloat = 1.0
    """Factor of the output of attention and MLP before the residual add."""
    embedding_norm: bool = False
    """A norm after the embedding, as in BERT."""
    embedding_scale: PositiveFloat = 1.0
    """Factor of the word embedding; Gemma has sqrt(`hidden_size`)."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP. `gelu_tanh` is the tanh approximation, `quick_gelu` is x * sigmoid(1.702 x); `swiglu` and
    `geglu` (with `gelu_tanh`) have a gate.
    """
    position: Literal["learned", "rotary", "relative"] = "learned"
    """`learned`: a table of positions is added to the word embedding; `rotary`: queries and keys are rotated;
    `relative`: T5's biases of attention scores.
    """
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    local_rotary_base: NonNegativeFloat = 0.0
    """Base in blocks with a window, which have no `rotary_scaling` then, as in Gemma 3; 0: as in other blocks."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of each head that is rotated, its first elements."""
    rotary_scaling: Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"] = "none"
    """Change of the frequencies for sequences longer than those of the first training; see `model/rotary.py`."""
    rotary_scaling_factor: PositiveFloat = 1.0
    """How many times longer the sequences are."""
    rotary_original_positions: NonNegativeInt = 0
    """Number of positions of the first training; 0: `max_position_embeddings`."""
    rotary_ramp: Numbers = ()
    """Rotations over the original positions: `yarn` and `llama3` divide a frequency by the factor below the first
    number, and keep it above the second. Empty: [1, 32] and [1, 4].
    """
    rotary_attention_factor: NonNegativeFloat = 0.0
    """Factor of rotated queries and keys with `yarn` and `longrope`; 0: that of their papers."""
    rotary_short_factors: Numbers = ()
    """Divisor of each frequency with `longrope`, in sequences up to the original positions."""
    rotary_long_factors: Numbers = ()
    """Divisor of each frequency with `longrope`, in longer sequences."""
    no_rope_freq: NonNegativeInt = 0
    """Every n-th block has no positions, as with Megatron's argument of this name; 0: none."""
    relative_buckets: PositiveInt = 32
    """Rows of a table of relative positions. A row serves one distance, or several far ones."""
    relative_max_distance: PositiveInt = 128
    """Distance in tokens from which on all relative positions have one bias."""
    num_tokentypes: NonNegativeInt = 0
    """Token types, such as BERT's first and second segment; a decoder's are `token_types` of custom data. 0: none."""
    binary_head: bool = False
    """BERT's second loss, of an `encoder`: whether two segments of a document are in their order."""
    bias: Bias = True
    """Biases of linear layers: of all, of none, or of query, key and value (`qkv`), these and the output projection
    (`attention`), or the `mlp` only.
    """
    head_bias: bool = False
    """A bias of the logits, as in GPT-J; it needs an untied head."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norms of queries and keys before the rotation: over each `head` as in Qwen3, or over all heads as in OLMo 2."""
    tie_embeddings: bool = True
    """The output head shares the weights of the word embedding."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the head's input; a T5 with a tied head has 1 / sqrt(`hidden_size`)."""
    logit_softcap: NonNegativeFloat = 0.0
    """Logits become softcap * tanh(logit / softcap), as in Gemma 2; 0 turns this off."""
    top_query_layer: bool = False
    """CodeGeeX's last block, whose queries are learned positions."""
    post_norm: bool = False
    """Residual branches start after the norm: Megatron's `--apply-residual-connection-post-layernorm`."""
    fp32_residual: bool = False
    """Residual stream in fp32: Megatron's `--fp32-residual-connection`."""
    hidden_dropout: Probability = 0.1
    """Dropout probability after the embedding, the attention and the MLP."""
    mlp_dropout: bool = True
    """Apply `hidden_dropout` after the MLP too; CodeGeeX has no dropout there."""
    attention_dropout: Probability = 0.1
    """Dropout probability of attention weights."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights; output layers of residual branches divide it by sqrt(2 * num_layers)."""
    embedding_init_std: NonNegativeFloat = 0.0
    """Standard deviation of the initial word embedding; 0: `init_std`."""
    attention: Literal["auto", "math", "tiled", "triton", "sdpa", "flex", "flash"] = "auto"
    """Implementation; `auto` takes the fastest one that computes the model on this device. `sdpa`, `flex`: torch's;
    `triton`, `tiled`: our FlashAttention; `flash`: flash-attn; `math`: the reference.
    """
    attention_scale: NonNegativeFloat = 0.0
    """Factor of attention scores; 0: 1 / sqrt(head size). T5 has 1."""
    attention_softcap: NonNegativeFloat = 0.0
    """Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 turns this off."""
    window_size: NonNegativeInt = 0
    """Keys that a query sees, its own included (sliding window attention); 0: no window."""
    window_attn_skip_freq: NonNegativeInt = 0
    """Every n-th block has no window, as with Megatron's argument of this name; 0: all blocks have it."""
    fusion: Literal["auto", "on", "off"] = "auto"
    """One kernel for the operations between products: by Triton on GPUs, by torch.compile on the CPU. `auto`: on GPUs
    only.
    """

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("preset"), str):
            return PRESETS.get(given["preset"], {}) | given
        return given

    def window_of(self, layer: int) -> int:
        """The window of a layer, numbered from 0 over the full model; 0: none."""
        skipped = self.window_attn_skip_freq and (layer + 1) % self.window_attn_skip_freq == 0
        return 0 if skipped else self.window_size

    def rotary_of(self, layer: int) -> Literal["", "full", "local"]:
        """The rotation in a layer, numbered as in `window_of`: none, by `rotary_base`, or by `local_rotary_base`."""
        skipped = self.no_rope_freq and (layer + 1) % self.no_rope_freq == 0
        if self.position != "rotary" or skipped:
            return ""
        return "local" if self.local_rotary_base and self.window_of(layer) else "full"

    def has_bias(self, layer: Literal["qkv", "proj", "mlp"]) -> bool:
        """Whether these linear layers have a bias."""
        wanted = {"qkv": ("qkv", "attention"), "proj": ("attention",), "mlp": ("mlp",)}[layer]
        return self.bias if isinstance(self.bias, bool) else self.bias in wanted

    @property
    def rotary_size(self) -> int:
        """The elements of a head that are rotated."""
        return int(self.head_size * self.rotary_percent)

    @property
    def encoder_layers(self) -> int:
        """The blocks of the encoder of an `encoder_decoder`, which come first in the model; else 0."""
        return (self.num_encoder_layers or self.num_layers) if self.architecture == "encoder_decoder" else 0

    @property
    def total_layers(self) -> int:
        """The blocks of encoder and decoder, without a top-query block."""
        return self.encoder_layers + self.num_layers

    @property
    def embedding_std(self) -> float:
        return self.embedding_init_std or self.init_std

    @property
    def has_gate(self) -> bool:
        """True where the first matrix of the MLP is gate and up, fused."""
        return self.activation in ("swiglu", "geglu")

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if self.has_gate:
            return max(64, int(8 * self.hidden_size / 3 / 64) * 64)
        return 4 * self.hidden_size

    @property
    def padded_vocab(self) -> int:
        return self.padded_vocab_size or -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
