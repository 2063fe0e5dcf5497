"""The short version of the fuzz; `python -m tests.fuzz.differential` is the long one."""

from collections import Counter

import pytest

from tests.fuzz.differential import run_spec
from tests.fuzz.models import random_spec

EAGER_SEEDS = range(7000, 7032)

# A fuzz that never replays is worth nothing: each of these must have occurred.
MUST_OCCUR = (
    "captures", "replays", "padded replays", "full captures", "piecewise captures", "runs without graphs",
    "cross_row", "input_moved", "not_seen_twice", "above_all_sizes", "too_much_padding", "mode_adapted",
    "piece_not_capturable",
)  # fmt: skip


def test_random_models_equal_eager_and_their_own_code_without_graphs():
    events: Counter[str] = Counter()
    for seed in EAGER_SEEDS:
        try:
            events += run_spec(random_spec(seed))
        except Exception as error:
            error.add_note(random_spec(seed).describe())
            raise
    assert not [name for name in MUST_OCCUR if not events[name]], events
    assert events["replays"] > 3 * len(EAGER_SEEDS)


@pytest.mark.parametrize(("compiler", "seed"), [("aot_eager", 7100), ("aot_eager", 7101), ("inductor", 7102)])
def test_random_models_equal_eager_with_other_compilers(compiler, seed, artifact_dir):
    run_spec(random_spec(seed, compiler=compiler))


def test_a_model_is_made_again_from_its_seed():
    assert random_spec(5) == random_spec(5)
    assert random_spec(5) != random_spec(6)
