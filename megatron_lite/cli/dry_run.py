"""The mistakes that a run would report after its ranks have started, found by reading corpora and checkpoint alone.

No index of samples is built: that can take minutes.
"""

from pathlib import Path

from megatron_lite.config.schema import Config
from megatron_lite.errors import MegatronLiteError
from megatron_lite.training.state import TrainState


def problems_of_data(config: Config, state: TrainState, data_parallel_size: int) -> list[str]:
    """A message for each mistake in the corpora of a run that continues from `state`."""
    from megatron_lite.data.blended import parse_paths, split_bounds
    from megatron_lite.data.corpus_info import check_tokenizers
    from megatron_lite.data.indexed import IndexedDataset
    from megatron_lite.data.text_dataset import num_documents
    from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
    from megatron_lite.training.corpora import check_corpora_end, wanted_samples

    data, is_decoder, problems = config.data, config.model.architecture == "decoder", []
    if state.iteration < config.train.iterations and data.split[0] == 0:
        problems.append("data.split[0] is 0, so there is no training data; make it larger than 0")
    blend = parse_paths(data.paths)
    try:
        corpora = [IndexedDataset(prefix) for prefix in blend.prefixes]
        if data.tokenizer_check:
            wanted_hash = tokenizer_hash(data.tokenizer) if data.tokenizer else ""
            check_tokenizers([(corpus.prefix, corpus.info) for corpus in corpora], wanted_hash)
        if data.tokenizer and is_decoder:
            check_corpora_end(config, corpora, build_tokenizer(data.tokenizer).eod)
    except MegatronLiteError as error:
        return [*problems, str(error)]
    wanted = wanted_samples(config.train, data_parallel_size, state)
    keys = ("train.iterations", "train.eval_iterations", "train.eval_iterations")
    for which, (name, key) in enumerate(zip(("train", "validation", "test"), keys, strict=True)):
        bounds = [split_bounds(data.split, len(c) if is_decoder else num_documents(c))[which] for c in corpora]
        if not wanted[which] or not any(bounds):
            continue
        if not is_decoder:
            continue  # the numbers are of documents, whose tokens the run counts
        is_one_epoch = blend.weights is None and len(corpora) > 1
        needed, tokens = data.seq_length + 1 if is_one_epoch else 1, []
        for corpus, pair in zip(corpora, bounds, strict=True):
            count = int(corpus.sequence_lengths[slice(*pair)].sum()) if pair else 0
            tokens.append(count)
            is_read = pair is not None and (name == "train" or pair[0] < pair[1])
            if is_read and count < needed:
                problems.append(
                    f"{corpus.prefix}: its part of the {name} split has {count:,} tokens, and needs {needed:,}; "
                    "give it a larger part of data.split"
                )
        samples = sum(max(0, count - 1) // data.seq_length for count in tokens)
        if is_one_epoch and wanted[which] > samples:
            problems.append(
                f"data.paths has no weights, so the {name} split is one epoch of each corpus, {samples:,} samples; "
                f"{wanted[which]:,} are needed; lower {key}, or put a weight before each prefix"
            )
    return problems


def problems_of_checkpoint(config: Config) -> list[str]:
    """A message for each setting that the weights or the optimizer state of the run's checkpoint do not fit."""
    from megatron_lite.checkpoint.compatible import STATE, changed_model, differing
    from megatron_lite.checkpoint.directory import locate
    from megatron_lite.checkpoint.layout import read_layout
    from megatron_lite.training.start import find_start

    if (weights := config.checkpoint.load_weights) and not Path(weights).exists():
        return [f"checkpoint.load_weights: {weights}: no such file or folder"]
    start = None if weights else find_start(config)
    if start is None:
        return []
    folder = locate(start.root, start.iteration)
    saved, now = read_layout(folder).config, config.model_dump(mode="json")
    problems = []
    if of_model := changed_model(saved, now):
        problems.append(f"{folder}: belongs to another model: {', '.join(of_model)}; choose another run.dir")
    if of_state := differing(saved, now, STATE):
        remedy = "restore the old values, or load the weights alone with checkpoint.load_weights"
        problems.append(f"{folder}: its optimizer state needs {', '.join(of_state)}: {remedy}")
    return problems
