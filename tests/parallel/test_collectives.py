"""Where the gradient of embedding and head is summed: over chunks of tokens on each device, then over devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def rows():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    found = subprocess.run(
        [sys.executable, HERE / "collectives_table.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_the_gradient_of_the_head_is_whole_in_the_loop_over_chunks(rows):
    """Only then can XLA move its sum over devices behind the loop; a part of it is scattered once a chunk. XLA's CPU
    back end does not move it, so its collectives would tell nothing; those for TPUs are in plan/test_plan_tpu.py."""
    assert {row["tied"] for row in rows} == {True, False}
    for row in rows:
        assert row["loops"] >= 1
        assert row["whole"] >= 1, row
        assert row["parts"] == 0, row
