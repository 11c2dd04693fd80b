"""Every test injects one fault; at the end the table of them is printed, fault and outcome."""

import pytest

FAULT = "fault"


@pytest.fixture
def fault(record_property):
    """`fault(what, outcome)`: the row of a test, to be called when the outcome has been seen."""
    return lambda what, outcome: record_property(FAULT, (what, outcome))


def pytest_terminal_summary(terminalreporter):
    rows = []
    for report in terminalreporter.getreports("passed"):
        rows += [tuple(value) for name, value in report.user_properties if name == FAULT]
    failed = [report.nodeid for report in terminalreporter.getreports("failed") if "faults" in report.nodeid]
    if not (rows or failed):
        return
    terminalreporter.section("faults")
    terminalreporter.write_line("| fault | outcome |\n|---|---|")
    for what, outcome in dict.fromkeys(rows):  # some are tried in many ways
        terminalreporter.write_line(f"| {what} | {outcome} |")
    for name in failed:
        terminalreporter.write_line(f"| {name} | **not as promised** |")
