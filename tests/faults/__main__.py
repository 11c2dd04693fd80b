"""`python -m tests.faults` injects every fault and prints the table fault → outcome."""

import sys
from pathlib import Path

import pytest

sys.exit(pytest.main(["-n", "0", "-q", str(Path(__file__).parent), *sys.argv[1:]]))
