"""The page of a report: as text, and in a real browser where there is one."""

import html
import re

import pytest
import torch

import piecewise_backend
from piecewise_backend.reporting.report import Report
from tests.browser import open_browser, why_no_browser
from tests.piecewise_backend.calling import Compiled
from tests.tiny import TinyDecoder, make_runner

no_browser = why_no_browser()
in_browser = pytest.mark.skipif(no_browser is not None, reason=f"the page is not opened: {no_browser}")


@pytest.fixture(scope="module")
def runner():
    return make_runner(model=TinyDecoder(num_layers=6), compiler="inductor")


@pytest.fixture(scope="module")
def saved(runner, tmp_path_factory):
    return runner.report.save(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def browser():
    with open_browser() as page:
        yield page


def hostile():
    report = Report(
        name="<script>alert('name')</script>",
        mode_requested="FULL",
        mode_resolved="FULL",
        recorder="none",
        num_pieces=0,
        num_breakpoints=0,
        compiled={},
        compile_seconds=0.0,
    )
    code, text = piecewise_backend.ReasonCode.CROSS_ROW, "</script><img src=x onerror=alert(1)>"
    report.reasons.add(piecewise_backend.Reason(code, text, text, text))
    return report


@pytest.mark.parametrize(("name", "begins"), [("r.html", "<!doctype html>"), ("r.JSON", "{"), ("r.txt", "mrv2 report")])
def test_the_suffix_of_the_name_decides_what_is_written(name, begins, tmp_path):
    path = hostile().save(tmp_path / name)
    assert path == tmp_path / name
    assert path.read_text(encoding="utf-8").startswith(begins)


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz"])
def test_another_suffix_is_refused_and_nothing_is_written(name, tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.html, \.json, \.txt, got"):
        hostile().save(str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_names_and_reasons_cannot_add_to_the_page(tmp_path):
    page = hostile().save(tmp_path / "r.html").read_text()
    assert "<img" not in page
    assert "alert('name')" not in page
    assert page.count("<script>") == page.count("</script>") == 1


def test_the_page_refers_to_nothing_outside_of_it(saved):
    page = saved.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", page)
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_a_notebook_shows_the_whole_page_in_a_frame_of_its_own():
    shown = hostile()._repr_html_()
    (source,) = re.findall(r'^<iframe [^>]*srcdoc="([^"]*)"></iframe>$', shown)
    assert html.unescape(source) == hostile()._page()


@in_browser
def test_equal_pieces_are_shown_folded_and_each_step_has_its_cell(browser, saved):
    browser.open(saved)
    assert [e.text for e in browser.all(".rail")] == ["× 5"]
    assert [e.text.split("\n")[0] for e in browser.all(".folded .name")] == ["mrv2::attention × 5", "piece × 5"]
    assert len(browser.all(".step")) == 5
    assert len(browser.all(".bar")) == 2
    assert len(browser.all(".cell")) == 2 * 13
    assert len(browser.all(".cell.eager")) == 6
    assert len(browser.all(".cell.joined")) == 12  # in decode batches all 13 steps are one graph


@in_browser
def test_fates_are_told_by_word_and_shape_besides_colour(browser, saved):
    browser.open(saved)
    assert [e.text for e in browser.all(".legend .fate")] == ["recorded", "eager", "never captured"]
    shapes = browser.run(
        "return [...document.querySelectorAll('.legend .mark')].map(e => getComputedStyle(e).borderRadius + "
        "getComputedStyle(e, '::before').transform)"
    )
    assert len(set(shapes)) == 3


@in_browser
def test_a_click_on_a_piece_shows_its_code_its_kernels_and_what_was_generated(browser, saved, runner):
    browser.open(saved)
    pieces = {piece["structure"]: piece for piece in runner.report.to_dict()["pieces"]}
    for number, step in enumerate(browser.all(".step")):
        step.click()
        browser.click(".piece [data-tab=code]")
        (article,) = browser.all(".piece")
        piece = pieces[article.get_attribute("data-structure")]
        assert step.get_attribute("data-piece") == piece["structure"]
        (shown,) = browser.all(".tab")
        assert "".join(shown.text.split()) == "".join(piece["code"].split()), number
        browser.click(".piece [data-tab=kernels]")
        assert [e.text.split()[0] for e in browser.all(".piece h4")] == [k["name"] for k in piece["kernels"]]
        browser.click(".piece [data-tab=generated]")
        generated = browser.all(".tab")[0].text
        assert ("async_compile" in generated) == (piece["generated"] is not None)


@in_browser
def test_a_cell_names_the_very_step_that_was_clicked(browser, saved):
    browser.open(saved)
    browser.click(".cell", 7)
    assert browser.all(".piece-name")[0].text == "mrv2::attention 7"
    assert "one of 6 alike" in browser.all(".piece h3")[0].text


@in_browser
def test_arrow_keys_walk_through_the_steps(browser, saved):
    browser.open(saved)
    browser.click(".step", 0)
    browser.driver.switch_to.active_element.send_keys("\ue015")  # arrow down
    assert browser.all(".piece-name")[0].text == "mrv2::attention 1"


@in_browser
def test_opening_and_clicking_make_no_request_and_no_word_on_the_console(browser, saved):
    browser.open(saved)
    for index in range(len(browser.all(".step"))):
        browser.click(".step", index)
    assert browser.console() == []
    assert browser.requests() == []


@in_browser
def test_what_is_hostile_is_text_in_the_browser_too(browser, tmp_path):
    browser.open(hostile().save(tmp_path / "r.html"))
    assert browser.all("h1")[0].text == "<script>alert('name')</script>"
    assert browser.console() == []


@in_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_nothing_is_wider_than_the_window(browser, saved, width, dark):
    browser.open(saved, width=width, dark=dark)
    browser.click(".step", 2)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
    inside = " && !e.closest('.tab, .scroll, .tabs')).map(e => e.className)"
    assert browser.run(f"return {wide}{inside}") == []
    shown = "getComputedStyle(document.querySelector('.piece:not([hidden]) .tab:not([hidden])'))"
    assert browser.run(f"return {shown}.overflowX") == "auto"  # long lines of code scroll by themselves


@in_browser
def test_text_stands_out_in_light_and_in_dark(browser, saved):
    for dark in (False, True):
        browser.open(saved, dark=dark)
        ink, paper = (
            [int(n) for n in re.findall(r"\d+", browser.run(f"return getComputedStyle(document.body).{name}"))[:3]]
            for name in ("color", "backgroundColor")
        )
        assert (sum(ink) > sum(paper)) == dark
        assert abs(sum(ink) - sum(paper)) > 3 * 150


@in_browser
def test_other_graphs_of_a_function_are_tabs(browser, tmp_path):
    def function(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y.sin()

    compiled = Compiled(function)
    compiled(torch.ones(4))
    browser.open(piecewise_backend.report(compiled.call).save(tmp_path / "r.html"))
    assert [e.text for e in browser.all(".graphs button")] == ["graph 2 (newest)", "graph 1"]
    assert "sin" in browser.all(".tab")[0].text
    browser.click(".graphs button", 1)
    assert "sin" not in browser.all(".tab")[0].text
