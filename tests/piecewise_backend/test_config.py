from pathlib import Path

import pytest

from piecewise_backend.config import Options, parse_options
from piecewise_backend.cudagraph.modes import CUDAGraphMode


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"spliting_ops": ()}, "splitting_ops"),
        ({"capture_size": ()}, "capture_sizes"),
        ({"mode": "PIECEWIS"}, "PIECEWISE"),
        ({"mode": "reduce_overhead"}, "reduce-overhead"),
        ({"compiler": "inducter"}, "inductor"),
        ({"recorder": "emulate"}, "emulated"),
        ({"padding": {"x": "zeros"}}, "zero"),
        ({"on_fallback": "errors"}, "error"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(options, near):
    with pytest.raises(ValueError, match="unknown") as caught:
        parse_options(options)
    assert repr(near) in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "expected", "inductor"),
    [
        ("default", "FULL_AND_PIECEWISE", {}),
        ("reduce-overhead", "FULL_AND_PIECEWISE", {}),
        ("max-autotune", "FULL_AND_PIECEWISE", {"max_autotune": True, "coordinate_descent_tuning": True}),
        ("max-autotune-no-cudagraphs", "NONE", {"max_autotune": True, "coordinate_descent_tuning": True}),
        ("full_decode_only", "FULL_DECODE_ONLY", {}),
        ("full-and-piecewise", "FULL_AND_PIECEWISE", {}),
        (CUDAGraphMode.PIECEWISE, "PIECEWISE", {}),
        (None, "FULL_AND_PIECEWISE", {}),
    ],
)
def test_modes_of_torch_compile_and_of_ours_are_understood(mode, expected, inductor):
    parsed = parse_options({}, mode=mode)
    assert parsed.mode == expected
    assert parsed.compiler_options == inductor
    assert parse_options({"mode": mode}) == parsed


def test_the_options_of_a_mode_give_way_to_the_users_own():
    parsed = parse_options({"compiler_options": {"max_autotune": False}}, mode="max-autotune")
    assert parsed.compiler_options == {"max_autotune": False, "coordinate_descent_tuning": True}


@pytest.mark.parametrize(
    "options",
    [
        {"capture_after": 0},
        {"capture_after": True},
        {"max_captures": -1},
        {"max_captures": 1.5},
        {"max_padding_waste": 2},
        {"max_padding_waste": "half"},
        {"capture_sizes": [4, 0]},
        {"capture_sizes": "8"},
        {"poison": "yes"},
        {"cache": 1},
        {"compiler_options": ["max_autotune"]},
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_that_names_the_option(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        parse_options(options)


def test_options_that_are_no_dict_are_an_error():
    with pytest.raises(ValueError, match="must be a dict"):
        parse_options(["mode"])  # type: ignore[arg-type]


def test_one_operator_or_size_stands_for_a_list_of_one():
    parsed = parse_options({"splitting_ops": "my::op", "capture_sizes": 8})
    assert parsed.splitting_ops == ("my::op",)
    assert parsed.capture_sizes == (8,)


def test_the_environment_is_read_where_options_are_silent(monkeypatch, tmp_path):
    monkeypatch.setenv("MRV2_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MRV2_RECORDER", "emulated")
    assert parse_options().cache_dir == tmp_path
    assert parse_options().recorder == "emulated"
    assert parse_options({"cache_dir": "~/there", "recorder": "none"}).cache_dir == Path.home() / "there"
    monkeypatch.setenv("MRV2_RECORDER", "emulate")
    with pytest.raises(ValueError, match="emulated"):
        parse_options()


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        Options().mode = "NONE"  # type: ignore[misc]
