"""The table of what was tested on vLLM's versions."""

import re
from pathlib import Path

from tests.vllm.version_table import HEAD, row_of

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
REPORT = """<testsuites><testsuite>
<testcase name="one"/><testcase name="two"/>
<testcase name="three"><skipped message="no second runner"/></testcase>
<testcase name="four"><failure message="no"/></testcase><testcase name="five"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_row_counts_what_the_tests_did_and_nothing_failed_on_the_versions_that_the_page_names(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    expected = "| 0.9.1 | core | 4 passed, 4 failed, 2 left out | no second runner |\n"
    assert row_of("0.9.1", "core", [report, report]) == expected
    _, table = PAGE.read_text().split(HEAD)
    rows = re.match(r"(\|.*\n)+", table)[0]
    assert "passed" in rows and "failed" not in rows
