"""The samples of a run that stops and resumes with other settings, beside those of a plain model of its order."""

import math
from itertools import count, islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.load import load_config
from megatron_lite.data.blended import Splits, parse_paths
from megatron_lite.data.loader import PrefetchingLoader
from megatron_lite.data.samples import sample_maker
from megatron_lite.data.text_dataset import permuted
from megatron_lite.data.tokenizer import BytesTokenizer
from megatron_lite.errors import DataError
from megatron_lite.training.corpora import check_lengths, open_splits, wanted_samples
from megatron_lite.training.state import TrainState, global_batch_size, num_microbatches
from tests.helpers.corpora import write_corpus

SEED, LENGTH = 7, 12
# Documents of corpora. An epoch of c has fewer tokens than a sample.
SIZES = {"a": [9, 30, 0, 25, 14, 40], "b": [22, 5, 18, 31], "c": [4, 5], "d": [60] * 40, "e": [35] * 30}
FORMS = {
    "one corpus": ("decoder", ["a"]),
    "weighted": ("decoder", ["0.7", "a", "0.3", "b"]),
    "weighted, one tiny": ("decoder", ["1", "a", "0.2", "c"]),
    "unweighted": ("decoder", ["d", "e"]),
    "BERT": ("encoder", ["a"]),
    "T5, weighted": ("encoder_decoder", ["2", "a", "1", "b"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found, first = tmp_path_factory.mktemp("corpora"), 0
    for name, lengths in SIZES.items():
        write_corpus(found / name, lengths, first_token=first)
        first += sum(lengths)
    return found


def documents_of(name):
    first = sum(sum(SIZES[other]) for other in SIZES if other < name)
    starts = first + np.cumsum([0, *SIZES[name]])
    return [list(range(start, end)) for start, end in pairwise(starts)]


def stream(documents, epochs, last_separate, seed):
    """Samples of Megatron's order of so many epochs."""
    random = np.random.RandomState(seed)
    mixed, last = list(range(len(documents))) * (epochs - last_separate), list(range(len(documents))) * last_separate
    random.shuffle(mixed)
    random.shuffle(last)
    tokens = [token for d in mixed + last for token in documents[d]]
    samples = [tuple(tokens[k : k + LENGTH + 1]) for k in range(0, len(tokens) - LENGTH, LENGTH)]
    in_an_epoch = sum(map(len, documents))
    border = ((epochs - 1) * in_an_epoch - 1) // LENGTH if last_separate else len(samples)
    parts = list(range(border)), list(range(border, len(samples)))
    for part in parts:
        random.shuffle(part)
    return [samples[k] for part in parts for k in part]


def decoder_order(name, planned):
    """The epochs of `planned` samples (None: one), then one after the other; endless."""
    documents = documents_of(name)
    size = sum(map(len, documents))
    epochs = next(n for n in count(1) if planned is None or (n * size - 1) // LENGTH >= planned)
    before = ((epochs - 1) * size - 1) // LENGTH
    separate = epochs > 1 and (planned or 0) - before < int(0.8 * ((size - 1) // LENGTH))
    yield from stream(documents, epochs, separate, SEED)
    enough = next(n for n in count(1) if n * size > LENGTH)
    for number in count() if planned is not None else ():
        yield from stream(documents, enough, False, [SEED, number])


def text_order(name, make):
    """All texts in one order after the other, each with its own masks; endless."""
    texts = []
    for document in documents_of(name):
        parts = -(-len(document) // make.text_length) if len(document) >= 3 else 0
        edges = [part * len(document) // parts for part in range(parts + 1)] if parts else []
        texts += [document[a:b] for a, b in pairwise(edges)]
    for sample in count():
        epoch, place = divmod(sample, len(texts))
        text = texts[permuted(place, len(texts), f"{SEED}/{epoch}")]
        fields = make(np.array(text), np.random.RandomState([SEED, sample, 0]))
        yield *fields["tokens"].tolist(), *fields["labels"].tolist()


def plain_order(paths, planned, make):
    """The samples of a run that was planned for so many; endless, unless the corpora have no weights."""
    blend = parse_paths(paths)
    if len(blend.prefixes) == 1:
        return decoder_order(paths[0], planned) if make is None else text_order(paths[0], make)
    shares = [None] * 2
    if blend.weights is not None:
        shares = [math.ceil(math.ceil(planned * weight) * 1.005) for weight in blend.weights.tolist()]
    if make is not None:
        return blended([text_order(name, make) for name in blend.prefixes], blend.weights, [math.inf] * 2)
    orders = [decoder_order(name, share) for name, share in zip(blend.prefixes, shares, strict=True)]
    if blend.weights is not None:
        return blended(orders, blend.weights, [math.inf] * 2)
    finite = [list(order) for order in orders]
    sizes = [len(order) for order in finite]
    return blended([iter(order) for order in finite], [size / sum(sizes) for size in sizes], sizes)


def blended(orders, weights, sizes):
    """The next sample of the corpus that is furthest behind and has one."""
    taken = [0] * len(orders)
    for sample in count() if sizes[0] == math.inf else range(sum(sizes)):
        behind = [
            w * max(sample, 1) - n if n < size else -math.inf for w, n, size in zip(weights, taken, sizes, strict=True)
        ]
        d = behind.index(max(behind))
        taken[d] += 1
        yield next(orders[d])


def started(folder, config, dp, state, stop):
    """The samples that a start reads until iteration `stop`, in the order of training."""
    train = config.train
    wanted = wanted_samples(train, dp, state)
    splits = open_splits(config, wanted, BytesTokenizer(), "", state)
    check_lengths(splits, train, dp, state)  # they suffice to the last iteration
    assert splits.train is not None
    loaders = [
        PrefetchingLoader(
            splits.train,
            train.micro_batch_size,
            dp_rank=rank,
            dp_size=dp,
            data=config.data,
            eod=256,
            device=torch.device("cpu"),
            first=state.order_start,
        )
        for rank in range(dp)
    ]
    seen = []
    while state.iteration < stop:
        number = num_microbatches(train, dp, state.consumed_samples)
        of_ranks = [loader.get(state.consumed_samples, number) for loader in loaders]
        for batch in (batch for microbatch in zip(*of_ranks, strict=True) for batch in microbatch):
            labels = batch.labels if config.model.architecture != "decoder" else batch.labels[:, -1:]
            seen += map(tuple, torch.cat((batch.tokens, labels), dim=1).tolist())
        state.consumed_samples += global_batch_size(train, dp, state.consumed_samples)
        state.iteration += 1
    for loader in loaders:
        loader.close()
    return seen


a_start = st.fixed_dictionaries(
    {
        "micro": st.integers(1, 3),
        "dp": st.integers(1, 3),
        "times": st.integers(0, 3),  # 0: the batch follows from the ranks
        "ramp": st.none() | st.integers(0, 60),
        "iterations": st.integers(1, 12),  # from its first one
        "stop": st.integers(1, 12),
        "branches": st.sampled_from([False] * 5 + [True]),
    }
)


def stops_and_resumes(folder, form, starts):
    architecture, names = FORMS[form]
    paths = [name if name not in SIZES else f"{folder}/{name}" for name in names]
    fields = [f"model.architecture={architecture}", f"data.seq_length={LENGTH}", "data.split=1,0,0"]
    base = load_config(
        None, [*fields, f"data.paths=[{','.join(paths)}]", f"run.seed={SEED}", "data.vocab_extra_ids=20"]
    )
    make = sample_maker(base, BytesTokenizer())
    state, seen, planned = TrainState(), [], 0
    for start in starts:
        state = TrainState.from_dict(state.to_dict())
        if start["branches"]:
            state.start_order()
            seen, planned = [], 0
        unit, times = start["micro"] * start["dp"], max(1, start["times"])
        batch = {"micro_batch_size": start["micro"], "global_batch_size": unit * start["times"]}
        ramp = {"ramp_up": (unit, unit, start["ramp"])} if start["ramp"] is not None and times > 1 else {}
        last = state.iteration + start["iterations"]
        train = base.train.model_copy(update={"iterations": last, "eval_iterations": 0, **batch, **ramp})
        consumed = state.consumed_samples
        for _ in range(start["iterations"]):
            consumed += global_batch_size(train, start["dp"], consumed)
        total = consumed - state.order_start
        planned = planned or total
        order = list(islice(plain_order(names, planned, make), total))
        config, stop = base.model_copy(update={"train": train}), min(last, state.iteration + start["stop"])
        if len(order) < total:
            with pytest.raises(DataError, match=f"one epoch of each corpus, .* {total:,} are needed; lower train.iter"):
                started(folder, config, start["dp"], state, stop)
            return
        seen += started(folder, config, start["dp"], state, stop)
        assert seen == order[: len(seen)] and len(seen) == state.consumed_samples - state.order_start


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None)
@given(starts=st.lists(a_start, min_size=1, max_size=5))
def test_no_change_at_a_resume_repeats_or_omits_a_sample(folder, form, starts):
    """Another batch, ramp, number of ranks or of iterations: the order stays, and a longer run appends epochs."""
    stops_and_resumes(folder, form, starts)


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=300, deadline=None)
@given(starts=st.lists(a_start, min_size=1, max_size=8))
def test_no_change_at_any_of_many_resumes_repeats_or_omits_a_sample(folder, form, starts):
    stops_and_resumes(folder, form, starts)


def test_a_dataset_that_is_too_short_is_an_error_that_names_length_batch_and_iterations():
    """Training would end in the middle, after hours."""
    train = load_config(None, ["train.iterations=25", "train.eval_iterations=3", "train.global_batch_size=4"]).train
    for_train, for_valid = (np.zeros(99), np.zeros(12), None), (np.zeros(100), np.zeros(11), None)
    finished = TrainState(iteration=25, consumed_samples=100)  # it is evaluated
    check_lengths(Splits(np.zeros(100), np.zeros(12), None), train, 1, TrainState())  # type: ignore[arg-type]
    check_lengths(Splits(*for_train), train, 1, finished)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"the train dataset has 99 .* 100: train.iterations is 25, .* batch is 4;"):
        check_lengths(Splits(*for_train), train, 1, TrainState())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"the valid dataset has 11 .* 12: train.eval_iterations is 3, .* batch is 4;"):
        check_lengths(Splits(*for_valid), train, 1, finished)  # type: ignore[arg-type]
