"""What a report says of the program: its steps folded, their fates, and how they came about."""

import json

import pytest
import torch

from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.fold import fold
from piecewise_backend.reporting.kernels import kernel_sources, library_calls
from tests.hybrid import make_hybrid_runner
from tests.piecewise_backend.calling import Compiled
from tests.piecewise_backend.operators import triple
from tests.tiny import TinyDecoder, make_runner

SDPA = torch.nn.functional.scaled_dot_product_attention


def fates_of(facts, kind):
    return [step["fates"][kind]["fate"] for step in facts["program"]["steps"]]


def whys_of(facts, kind):
    return {step["fates"][kind]["why"] for step in facts["program"]["steps"]} - {""}


def titles_of(facts):
    return [step["title"] for step in facts["story"]]


def sdpa_and_a_mask(x):
    y = SDPA(x, x, x)
    y[y > 0] = y[0, 0, 0, 0]
    return SDPA(y, y, y) * 2


def test_a_row_in_which_the_same_few_come_again_is_folded_and_nothing_is_lost():
    row = "abcbcbcbd"
    runs = list(fold(row))
    assert [(r.start, r.period, r.repeats) for r in runs] == [(0, 1, 1), (1, 2, 3), (7, 1, 1), (8, 1, 1)]
    assert runs[1].places(0) == [1, 3, 5]
    unfolded = [row[r.start + i] for r in runs for _ in range(r.repeats) for i in range(r.period)]
    assert "".join(unfolded) == row


@pytest.mark.parametrize(("row", "num_runs"), [("", 0), ("a", 1), ("aaaa", 1), ("abab", 1), ("abc", 3), ("abbcbbc", 2)])
def test_folding_covers_each_place_once_with_few_runs(row, num_runs):
    runs = list(fold(row))
    assert len(runs) == num_runs
    places = sorted(place for r in runs for offset in range(r.period) for place in r.places(offset))
    assert places == list(range(len(row)))


def test_equal_layers_are_one_line_with_their_number_whatever_their_names():
    facts = make_runner(model=TinyDecoder(num_layers=5)).report.to_dict()
    assert len(facts["program"]["steps"]) == 11
    repeats = [(row["repeat"], row["steps"]) for row in facts["program"]["rows"]]
    assert repeats == [(1, [[0]]), (4, [[1, 3, 5, 7], [2, 4, 6, 8]]), (1, [[9]]), (1, [[10]])]
    layers = [step["layer"] for step in facts["program"]["steps"] if step["is_breakpoint"]]
    assert len(set(layers)) == 5
    assert len(facts["pieces"]) == 4


def test_attention_is_recorded_in_decode_batches_and_eager_in_mixed_ones_with_the_reason():
    facts = make_runner("FULL_AND_PIECEWISE", model=TinyDecoder(num_layers=1)).report.to_dict()
    assert fates_of(facts, "decode") == ["recorded"] * 3
    assert fates_of(facts, "mixed") == ["recorded", "eager", "recorded"]
    assert whys_of(facts, "mixed") == {"mode PIECEWISE runs attention between graphs"}


def test_a_kind_of_batch_without_graphs_says_which_mode_decided_that():
    facts = make_runner("FULL_DECODE_ONLY", model=TinyDecoder(num_layers=1)).report.to_dict()
    assert fates_of(facts, "mixed") == ["never captured"] * 3
    assert whys_of(facts, "mixed") == {"mode FULL_DECODE_ONLY records no mixed batches"}


def test_without_a_recorder_nothing_is_captured_for_any_kind():
    facts = make_runner("FULL_AND_PIECEWISE", model=TinyDecoder(num_layers=1), recorder="none").report.to_dict()
    assert set(fates_of(facts, "decode") + fates_of(facts, "mixed")) == {"never captured"}
    assert facts["story"][-1]["title"] == "nothing is recorded"


def test_one_kind_is_shown_where_decode_has_no_graphs_of_its_own():
    facts = make_runner("PIECEWISE", model=TinyDecoder(num_layers=1)).report.to_dict()
    assert [kind["name"] for kind in facts["kinds"]] == ["mixed"]
    assert fates_of(facts, "mixed") == ["recorded", "eager", "recorded"]


def test_only_the_group_that_cannot_record_a_prefill_breaks_and_the_story_says_so_in_order():
    facts = make_hybrid_runner("FULL").report.to_dict()
    eager = {s["name"].split()[0] for s in facts["program"]["steps"] if s["fates"]["mixed"]["fate"] == "eager"}
    assert eager == {"mrv2::linear_attention"}
    assert "its metadata builder is UNIFORM_BATCH" in whys_of(facts, "mixed").pop()
    titles = titles_of(facts)
    assert titles[0] == "asked for FULL"
    codes = [step["code"] for step in facts["story"]]
    assert codes.index("mode_adapted") < codes.index("group_breaks") < titles.index("resolved to FULL_AND_PIECEWISE")
    assert titles[-1] == f"{len(facts['captures'])} variants recorded with the emulated recorder"


def test_an_operator_without_metadata_is_eager_where_padded_and_recorded_where_exact():
    compiled = Compiled(sdpa_and_a_mask, capture_sizes=(4,))
    for rows in (4, 3):
        compiled(torch.randn(rows, 2, 5, 16))
    facts = compiled.report.to_dict()
    assert fates_of(facts, "exact") == ["recorded", "never captured", "recorded", "recorded"]
    assert fates_of(facts, "padded") == ["eager", "never captured", "eager", "recorded"]
    whys = whys_of(facts, "padded")
    assert "it is given the real rows only, and this batch is padded" in whys
    assert any("y[y > 0] = y[0, 0, 0, 0]" in why for why in whys)


def test_an_operator_nobody_vouched_for_says_how_to_vouch():
    compiled = Compiled(lambda x: triple(x + 1) + 1, splitting_ops=("probe::triple",), capture_sizes=(4,))
    compiled(torch.randn(4))
    facts = compiled.report.to_dict()
    (why,) = whys_of(facts, "padded")
    assert "register_breakpoint(op, capturable=True)" in why


def test_before_the_first_capture_a_plain_call_says_that_none_has_been_made():
    compiled = Compiled(lambda x: x + 1, capture_after=5)
    compiled(torch.ones(4))
    assert whys_of(compiled.report.to_dict(), "calls") == {"no size has been captured yet"}


def test_reasons_of_one_code_are_together_with_each_way_out_once_and_losses_first():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(4,), capture_after=2)
    for rows in (4, 4, 9, 10):
        compiled(torch.ones(rows))
    hint = "add it to options={'capture_sizes': [...]}"
    compiled.report.reasons.add(Reason(ReasonCode.ABOVE_ALL_SIZES, "another batch", "above them too", hint))
    found = {group["code"]: group for group in compiled.report.to_dict()["fallbacks"]}
    assert list(found) == ["above_all_sizes", "not_seen_twice"]
    above = found["above_all_sizes"]
    assert (above["times"], above["is_fallback"], len(above["reasons"])) == (3, True, 2)
    assert above["hints"] == [hint]
    assert not found["not_seen_twice"]["is_fallback"]


def test_sizes_carry_time_memory_replays_and_padding():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(4,))
    for rows in (3, 3, 3):
        compiled(torch.ones(rows))
    (size,) = compiled.report.to_dict()["captures"]
    assert (size["kind"], size["num_tokens"], size["replays"], size["padding_waste"]) == ("padded", 4, 2, 0.25)
    assert size["seconds"] > 0
    assert size["memory_bytes"] > 0


def test_a_piece_shows_its_operators_and_its_readable_code():
    compiled = Compiled(lambda x: (x + 1).relu() + 2)
    compiled(torch.ones(4))
    (piece,) = compiled.report.to_dict()["pieces"]
    assert {one["operator"]: one["times"] for one in piece["launches"]} == {"add": 2, "relu": 1}
    assert "def forward(self" in piece["code"]
    assert piece["generated"] is None
    assert piece["kernels"] == []


def test_a_graph_that_cannot_be_written_as_python_runs_and_its_report_says_why(monkeypatch):
    def refuse(module):
        raise ValueError("no such\nform")

    monkeypatch.setattr("piecewise_backend.reporting.steps.readable_code", refuse)
    compiled = Compiled(lambda x: x + 1)
    assert compiled(torch.ones(4)).tolist() == [2.0] * 4
    (piece,) = compiled.report.to_dict()["pieces"]
    assert piece["code"] == "# torch cannot write this graph as Python: ValueError: no such form\n"


def test_what_inductor_generated_comes_with_its_kernels():
    compiled = Compiled(lambda x: (x + 1).relu() + 2, compiler="inductor")
    compiled(torch.ones(4))
    (piece,) = compiled.report.to_dict()["pieces"]
    assert piece["source"] == "inductor"
    assert [kernel["name"] in piece["generated"] for kernel in piece["kernels"]] == [True]
    assert "for" in piece["kernels"][0]["code"]


def test_kernels_of_both_languages_and_library_calls_are_found_in_generated_code():
    generated = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
import triton
''', device_str='cuda')
cpp_fused_1 = async_compile.cpp_pybinding(['const float*'], r'''
void kernel() {}
''')
extern_kernels.mm(a, b, out=c)
extern_kernels.mm(c, d, out=e)
"""
    kernels = [("triton_poi_fused_0", "triton", "import triton"), ("cpp_fused_1", "c++", "void kernel() {}")]
    assert list(kernel_sources(generated)) == kernels
    assert library_calls(generated) == ["extern_kernels.mm"]


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_the_data_goes_through_json_unchanged(mode):
    report = make_runner(mode, model=TinyDecoder(num_layers=2)).report
    facts = report.to_dict()
    assert json.loads(report.to_json()) == facts
    assert (facts["format"], facts["mode"]["requested"]) == (1, mode)


def test_every_key_of_the_data_is_documented():
    from piecewise_backend.reporting import as_dict

    def keys(value):
        if isinstance(value, dict):
            yield from value
            value = value.values()
        for inner in value if not isinstance(value, str) else ():
            if isinstance(inner, dict | list | tuple):
                yield from keys(inner)

    facts = make_hybrid_runner("FULL").report.to_dict()
    kinds = {kind["name"] for kind in facts["kinds"]}
    assert {key for key in keys([facts]) if key not in as_dict.__doc__} - kinds == set()
