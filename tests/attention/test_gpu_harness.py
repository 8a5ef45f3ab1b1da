"""The benchmarks for a GPU run: on the CPU with tiny shapes, so that they are ready when a device is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / name), *options], capture_output=True, text=True)


def test_values_and_costs_of_every_backend_are_measured():
    done = run("attention_gpu.py", "--device", "cpu", "--tiny", "--json")
    assert done.returncode == 0, done.stderr
    figures = {row["figure"]: row for row in json.loads(done.stdout)["rows"]}
    assert 0 < figures["cpu_flash: worst error of out, lse and gradients in bfloat16"]["value"] < 5e-3
    assert "no backward on the CPU" in figures["flex: values and gradients"]["unit"]
    assert {"eager", "block", "cpu_flash"} == {name.split(",")[0] for name in figures if "256 tokens, causal" in name}


def test_an_update_of_each_way_is_measured_and_computes_the_same():
    ways = {way: run("paper_memory_gpu.py", "--device", "cpu", "--tiny", "--case", f"{way}:256") for way in ("eager", "ours")}
    assert all(done.returncode == 0 for done in ways.values()), [done.stderr for done in ways.values()]
    eager, ours = (json.loads(done.stdout.splitlines()[-1])["logprob"] for done in ways.values())
    assert eager < -5 and ours == pytest.approx(eager, abs=2e-3)


@NO_GPU
@pytest.mark.parametrize("name", ["attention_gpu.py", "paper_memory_gpu.py"])
def test_without_a_device_they_say_so_in_one_line(name: str):
    for options, words in (((), "torch sees no CUDA device"), (("--device", "cpu"), "needs --tiny")):
        done = run(name, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and words in done.stderr
