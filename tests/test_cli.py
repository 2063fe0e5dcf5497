"""The command: what it says to a person."""

import pytest

from piecewise_backend.cli import main


def test_doctor_names_what_works_and_what_would_bring_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for what in ("torch", "CUDA graphs", "emulated recorder", "Inductor", "'triton'", "flashinfer", "artifact folder"):
        assert what in shown


def test_a_model_that_does_not_exist_ends_with_status_two_and_one_clear_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--model", "nowhere", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith("mrv2: no model at 'nowhere': give a local folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "FUL"], "unknown mode 'FUL'; did you mean 'FULL'"),
        (["--recorder", "emulate"], "did you mean 'emulated'"),
        (["--dtype", "int8"], "unknown dtype 'int8'; allowed: float32, float16, bfloat16"),
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1"),
    ],
)
def test_a_wrong_value_is_named_before_any_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "nowhere", "--prompt", "x", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--model", "x", "--prompt", "x", "--capture-sizes", "1,b"])
    assert "expected sizes such as 1,2,4,8, got '1,b'" in capsys.readouterr().err


def test_a_draft_model_without_a_number_of_guesses_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--model", "smollm2", "--prompt", "x", "--draft-layers", "2"]) == 2
    assert "--draft-layers needs --draft-tokens" in capsys.readouterr().err


def test_text_is_the_same_with_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "smollm2", "--prompt", "The capital of France is", "--max-tokens", "6", "--device", "cpu"]
    quick = ["--compiler", "eager", "--mode", "NONE", "--max-num-tokens", "16"]
    assert main(["generate", *arguments, *quick, "--draft-tokens", "2", "--draft-layers", "2"]) == 0
    shown = capsys.readouterr().out
    assert "The capital of France is Paris." in shown
    assert "guesses accepted" in shown
