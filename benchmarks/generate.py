"""Tokens per second of generation with the key/value cache and without, on one process and on two.

    python benchmarks/generate.py [--rounds 3] [--only REGEX] [--small]

The contestants generate the same texts in turn, from the same random weights. Times include the prompts.
"""

import re
import statistics
from collections.abc import Callable
from functools import partial

import torch
from contest import Contestant, arguments, gpt_config

SHAPE = {"layers": 4, "hidden": 256, "heads": 8, "vocab": 4096, "sequence": 512, "batch": 1, "prompt": 128, "new": 128}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 128, "batch": 1, "prompt": 16, "new": 16}
CASES = {
    f"{'cache' if cache else 'no cache'}, {texts} text{'s' * (texts > 1)}, {name}": (cache, texts, ranks, layout)
    for ranks, name, layout in (
        (1, "one process", []),
        (2, "tp 2", ["parallel.tensor=2"]),
        (2, "pp 2", ["parallel.pipeline=2"]),
    )
    for texts in (1, 8)
    for cache in (True, False)
    if ranks == 1 or texts == 1
}


def contestant(shape: dict[str, int], cache: bool, num_texts: int, layout: list[str]) -> Callable[[], float]:
    from megatron_lite.data.tokenizer import BytesTokenizer
    from megatron_lite.generate.model import LanguageModel, Speed, continue_texts
    from megatron_lite.generate.sampling import Sampling
    from megatron_lite.generate.texts import Text
    from megatron_lite.model.build import get_model
    from megatron_lite.training.initialize import initialize_megatron

    config = gpt_config(shape, *layout)
    ctx, rng = initialize_megatron(config)
    chunks = [chunk.eval() for chunk in get_model(config, ctx, rng, dtype=torch.float32)]
    model, tokenizer = LanguageModel(chunks, config, ctx), BytesTokenizer()
    tokenizer.eod = -1  # type: ignore[misc]
    draws = torch.Generator().manual_seed(0)
    prompts = torch.randint(256, (num_texts, shape["prompt"]), generator=draws).tolist()

    def step() -> float:
        texts = [Text(tokenizer, "", list(ids), torch.Generator(), shape["new"], shape["sequence"]) for ids in prompts]
        continue_texts(model, texts, Sampling(temperature=0), cache=cache, speed=Speed())
        return float(sum(texts[0].ids))

    return step


def main() -> None:
    args = arguments(__doc__).parse_args()
    shape = SMALL if args.small else SHAPE
    print(f"torch {torch.__version__}, fp32, 2 threads together, {args.rounds} rounds, {shape}", flush=True)
    running = {
        name: Contestant(partial(contestant, shape, cache, texts, layout), ranks, 29900 + number)
        for number, (name, (cache, texts, ranks, layout)) in enumerate(CASES.items())
        if re.search(args.only, name)
    }
    for number in range(args.rounds + 1):
        sums = {name: ranks.step() for name, ranks in running.items()}
        assert len(set(sums.values())) == 1, sums  # the same tokens
        if number == 0:
            for ranks in running.values():
                ranks.seconds.clear()
    print(f"{'':34}{'tokens/s':>10}{'/ no cache':>12}")
    for name, ranks in running.items():
        ranks.stop()
        rate = CASES[name][1] * shape["new"] / statistics.median(ranks.seconds)
        other = running.get(f"no {name.removeprefix('no ')}")
        ratio = statistics.median(other.seconds) / statistics.median(ranks.seconds) if other else float("nan")
        print(f"{name:34}{rate:10.1f}{ratio:12.2f}")


if __name__ == "__main__":
    main()
