"""The table of what was tested on vLLM's versions."""

import pytest

from tests.vllm.version_table import HEAD, PAGE, parts_of, row_of, with_row

REPORT = """<testsuites><testsuite>
<testcase name="one"/><testcase name="two"/>
<testcase name="three"><skipped message="no second runner"/></testcase>
<testcase name="four"><skipped message="no second runner"/></testcase>
<testcase name="five"><{} message="no"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("how", ["failure", "error"])
def test_a_row_counts_what_the_tests_did_and_says_what_was_left_out(how, tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(how))
    assert (
        row_of("0.9.1", "core", [report, report])
        == "| 0.9.1 | core | 4 passed, 2 failed, 4 left out | no second runner |\n"
    )


def test_a_row_takes_the_place_of_the_version_s_former_one():
    page = f"before\n\n{HEAD}| 0.9.1 | core | 1 passed |  |\n| 0.10.0 | core | 2 passed |  |\n\nafter\n"
    rows = ["| 0.9.1 | all | 3 passed |  |\n", "| 0.9.2 | core | 4 passed |  |\n"]
    for row in rows:
        page = with_row(page, row)
    assert parts_of(page) == ("before\n\n", [*rows, "| 0.10.0 | core | 2 passed |  |\n"], "\nafter\n")


def test_a_row_of_the_core_does_not_take_the_place_of_one_of_all_tests():
    page = f"{HEAD}| 0.9.1 | all | 9 passed |  |\n"
    assert with_row(page, "| 0.9.1 | core | 3 passed |  |\n") == page


def test_nothing_failed_on_the_versions_that_the_page_names():
    _, rows, _ = parts_of(PAGE.read_text())
    assert rows and not any("failed" in row for row in rows)
