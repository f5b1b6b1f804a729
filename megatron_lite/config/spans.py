"""How long the samples of span corruption are, by arithmetic.

Spans of a text are replaced by one sentinel each, and the decoder predicts the spans, each after its sentinel. Both
sequences end with an end token.
Source: Raffel et al., T5, arXiv 1910.10683, section 3.1.4, and `compute_input_and_target_lengths` of its code.
"""


def num_noise_tokens(num_tokens: int, density: float, mean_span: float) -> tuple[int, int]:
    """The tokens of a text that are in spans, and the number of spans. A text has at least two tokens."""
    noise = min(max(round(num_tokens * density), 1), num_tokens - 1)
    spans = min(max(round(noise / mean_span), 1), num_tokens - noise)
    return noise, spans


def lengths_of(num_tokens: int, density: float, mean_span: float) -> tuple[int, int]:
    """The tokens of the encoder and of the decoder for a text."""
    noise, spans = num_noise_tokens(num_tokens, density, mean_span)
    return num_tokens - noise + spans + 1, noise + spans + 1


def longest_text(seq_length: int, decoder_length: float, density: float, mean_span: float) -> int:
    """The most tokens of a text that fit into both sequences: at least two, and at most four times `seq_length`."""
    for num_tokens in range(2, 4 * seq_length):
        encoder, decoder = lengths_of(num_tokens + 1, density, mean_span)
        if encoder > seq_length or decoder > decoder_length:
            return num_tokens
    return 4 * seq_length
