"""``kestrel bench``: records, hashes, formats, usage; and that changed bits cannot pass."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel import bench, cli
from kestrel.benchmark import output
from kestrel.benchmark.matrix import Cell, Variant, plan_cells, run_group
from kestrel.benchmark.records import changed_bits, summarise
from kestrel.benchmark.runner import BitsDifferError, Runner
from kestrel.benchmark.shapes import kv_bytes_per_token, weight_bytes_per_token
from kestrel.benchmark.synthetic import Recipe, fill, kv_recipes, pending_weights
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.ops import WType
from kestrel.simt import SimtBackend
from kestrel.weights import Weights
from tests.engine.test_greedy_loop import LoopBackend
from tests.support.shared import REPOSITORY

TESTS = ["-p", "12", "-n", "4", "-d", "0,40", "-r", "3", "-t", "1"]


def runner(config: ModelConfig, weights: Weights, backend: Any = None, **options: Any) -> Runner:
    options = {"context": 128, "chunk": 8, "seed": 0, **options}
    return Runner(config, weights, backend or CpuBackend(1), **options)


def run(runner: Runner, depth: int, count: int = 4) -> tuple[list[int], str]:
    _, chosen = runner.generate(count, depth)
    return chosen, runner.output_hash(chosen, depth, count)


# -- the runner ----------------------------------------------------------------------------------------------


def test_the_hash_does_not_depend_on_how_it_ran(small_config: ModelConfig, small_weights: Weights) -> None:
    """Threads, ISA, chunking, context, the kernels' source on the CPU, and feedback of the token."""
    runners = [
        runner(small_config, small_weights),
        runner(small_config, small_weights, CpuBackend(2, "scalar"), chunk=5, context=200),
        runner(small_config, small_weights, SimtBackend()),
        runner(small_config, small_weights, LoopBackend(1)),
    ]
    for depth in (0, 40):
        assert len({run(r, depth)[1] for r in runners}) == 1
        prompts = [r.output_hash(r.prompt(12, depth)[1], depth, 12) for r in runners]
        assert len(set(prompts)) == 1
        assert prompts[0] != run(runners[0], depth)[1]


def test_every_part_of_the_output_moves_the_hash(small_config: ModelConfig, small_weights: Weights) -> None:
    """A bit in a KV row of the first layer, a scale of the last, the last logit, a token."""
    r = runner(small_config, small_weights)
    chosen, expected = run(r, 10)
    assert r.output_hash(chosen, 10, 4) == expected
    assert r.output_hash([*chosen[:-1], chosen[-1] ^ 1], 10, 4) != expected
    for array, index in (
        (r.model.kv.layers[0].kq, (10, 0, 0)),
        (r.model.kv.layers[1].vs, (13, 1)),
        (r.model.buffer("logits", small_config.vocab_size, np.float32), (0, small_config.vocab_size - 1)),
    ):
        values: Any = array.array.view(f"u{array.dtype.itemsize}")  # type: ignore[attr-defined]
        values[index] ^= 1
        assert r.output_hash(chosen, 10, 4) != expected
        values[index] ^= 1
    assert r.output_hash(chosen, 10, 4) == expected


def test_seeded_rows_are_part_of_what_runs(small_config: ModelConfig, small_weights: Weights) -> None:
    one, other = (runner(small_config, small_weights, seed=seed) for seed in (0, 1))
    assert run(one, 40) != run(other, 40)
    one.fill_depth(40)
    layer: Any = one.model.kv.layers[0]
    before = run(one, 40)
    layer.vq.array[20] = -layer.vq.array[20]
    assert run(one, 40)[1] != before[1]


def test_depths_in_any_order_hold_the_same_rows(small_config: ModelConfig, small_weights: Weights) -> None:
    """Runs overwrite rows; what is filled again must be those and no others."""
    fresh = {
        depth: run(runner(small_config, small_weights), depth)[1] for depth in (0, 3, 17, 40, 64, 90, 124)
    }
    used = runner(small_config, small_weights)
    rng = np.random.default_rng(3)
    for depth in rng.choice(sorted(fresh), 40):
        assert run(used, int(depth))[1] == fresh[int(depth)]
        if rng.random() < 0.3:
            used.prompt(int(rng.integers(1, 30)), int(rng.integers(0, 90)))


def test_only_changed_rows_are_filled_again(
    small_config: ModelConfig, small_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = runner(small_config, small_weights)
    filled: list[tuple[int, int]] = []
    original = r._fill
    monkeypatch.setattr(r, "_fill", lambda a, b: (filled.append((a, b)), original(a, b)))
    r.generate(4, 100)
    r.generate(4, 0)
    r.generate(4, 50)
    r.generate(4, 110)
    assert filled == [(0, 100), (0, 4), (50, 54), (100, 110)]
    rows = r.kv_rows(0, 110)
    for layer in range(small_config.num_layers):
        for name, width, recipe in kv_recipes(small_config, layer):
            expected = np.empty(110 * width, recipe.table.dtype)
            fill(expected, recipe)
            found = rows[4 * layer + ["kq", "ks", "vq", "vs"].index(name)]
            np.testing.assert_array_equal(found.reshape(-1), expected)


def test_the_dump_variant_reads_hashes_and_changes_nothing(
    small_config: ModelConfig, small_weights: Weights
) -> None:
    for backend in (CpuBackend(1), LoopBackend(1)):
        r = runner(small_config, small_weights, backend)
        plain = run(r, 5)
        _, chosen = r.generate(4, 5, "standard")
        assert (chosen, r.output_hash(chosen, 5, 4)) == plain


# -- cells ---------------------------------------------------------------------------------------------------


class Scripted:
    """A runner that answers from a list."""

    def __init__(self, log: list[str], name: str, hashes: list[str]) -> None:
        self.log, self.name, self.hashes = log, name, hashes

    def generate(self, count: int, depth: int, taps: str) -> tuple[float, list[int]]:
        self.log.append(f"{self.name}{count}")
        return 0.001 * count, [1] * count

    def output_hash(self, *_: Any) -> str:
        return self.hashes.pop(0) if len(self.hashes) > 1 else self.hashes[0]


def scripted(exact: list[str], fast: list[str]) -> tuple[list[str], dict[Any, Any], list[Cell]]:
    log: list[str] = []
    runners = {
        ("l2exact", True): Scripted(log, "e", exact),
        ("fast", True): Scripted(log, "f", fast),
        ("l2exact", False): Scripted(log, "g", ["a"]),
    }
    (cells,) = plan_cells([Variant(), Variant("fast"), Variant(graph=False)], 0, 32, [0])
    return log, runners, cells


def promised(variant: Variant) -> bool:
    return variant.mode == "l2exact"


def test_variants_are_interleaved_and_warmed_up() -> None:
    log, runners, cells = scripted(["a"], ["b"])
    run_group(runners, cells, 3, exact=promised)
    assert log == ["e8", "f8", "g8", *("e32", "f32", "g32"), *("g32", "f32", "e32"), *("e32", "f32", "g32")]
    assert [len(cell.seconds) for cell in cells] == [3, 3, 3]


@pytest.mark.parametrize(
    ("exact", "message"),
    [(["a", "a", "x"], "repeat 3 gave output hash x"), (["x"], "eager gave output hash a, l2exact x")],
)
def test_bits_that_move_within_a_run_are_an_error(exact: list[str], message: str) -> None:
    _, runners, cells = scripted(exact, ["b"])
    with pytest.raises(BitsDifferError, match=message):
        run_group(runners, cells, 3, exact=promised)


def test_a_mode_without_promise_may_move() -> None:
    _, runners, cells = scripted(["a"], ["b", "c", "d"])
    run_group(runners, cells, 3, exact=promised)


def test_prompts_run_once_a_mode() -> None:
    groups = plan_cells([Variant(), Variant(graph=False), Variant(taps="standard")], 16, 8, [0, 1024])
    assert [[cell.label for cell in group] for group in groups] == [
        ["pp16"],
        ["tg8"] * 3,
        ["pp16 @ d1024"],
        ["tg8 @ d1024"] * 3,
    ]


def test_statistics() -> None:
    cell = Cell(Variant(), 0, 10, 0, test_time=1.0, seconds=[0.01, 0.03, 0.02, 0.05, 0.04], chosen=[1, 2, 2])
    record = summarise(cell)
    assert record["samples_ns"] == [10_000_000, 30_000_000, 20_000_000, 50_000_000, 40_000_000]
    assert record["avg_ns"] == 30_000_000
    assert record["stddev_ns"] == pytest.approx(15_811_388, abs=1)
    rates = [1000, 333.3333333, 500, 200, 250]
    assert record["samples_ts"] == pytest.approx(rates)
    assert record["avg_ts"] == pytest.approx(statistics.fmean(rates))
    assert record["stddev_ts"] == pytest.approx(statistics.stdev(rates))
    assert record["ms_per_token_median"] == pytest.approx(3.0)
    assert record["ms_per_token_p5"] == pytest.approx(1.2)
    assert record["ms_per_token_p95"] == pytest.approx(4.8)
    assert record["ts_median"] == pytest.approx(333.333, rel=1e-5)
    assert record["distinct_tokens"] == 2


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, small_config: ModelConfig) -> Iterator[dict[str, Path]]:
    """One run, written in every format."""
    from kestrel.benchmark.shapes import SHAPES

    SHAPES["small"] = small_config
    folder = tmp_path_factory.mktemp("records")
    files = {kind: folder / f"records.{kind}" for kind in ("json", "jsonl", "csv", "md")}
    outputs = [argument for file in files.values() for argument in ("-o", str(file))]
    assert bench.main(["--shape", "small", *TESTS, "--dump", "-q", *outputs]) == 0
    yield files
    del SHAPES["small"]


# Those of llama-bench's JSON that mean the same here.
LLAMA_BENCH = {
    "build_commit",
    "cpu_info",
    "gpu_info",
    "backends",
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "type_k",
    "type_v",
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "samples_ns",
    "samples_ts",
}


def test_records_have_what_is_promised(records: dict[str, Path], small_config: ModelConfig) -> None:
    found = json.loads(records["json"].read_text())
    assert [(r["test"], r["taps"]) for r in found] == [
        ("pp12", "off"),
        ("tg4", "off"),
        ("tg4", "standard"),
        ("pp12 @ d40", "off"),
        ("tg4 @ d40", "off"),
        ("tg4 @ d40", "standard"),
    ]
    weights = pending_weights(small_config, WType.q4local, WType.q8local)
    for record in found:
        assert record.keys() >= LLAMA_BENCH
        assert len(record["samples_ns"]) == 3
        assert re.fullmatch("[0-9a-f]{16}", record["output_hash"])
        assert record["bits_promised"] is True
        assert record["contract"] == "2"
        assert record["isa"] in ("scalar", "avx2", "avx512")
        assert record["peak_memory_bytes"] > 1e7
        assert (record["n_prompt"], record["n_gen"]) in ((12, 0), (0, 4))
        assert record["depth_contents"] == ("seeded KV rows" if record["n_depth"] else None)
        if record["n_gen"]:
            expected = weight_bytes_per_token(small_config, weights)
            expected += kv_bytes_per_token(small_config, record["n_depth"], 4)
            assert record["bytes_per_token"] == expected
            rate = expected * record["ts_median"] / 1e9
            assert record["gb_per_second"] == pytest.approx(rate)
            assert record["share_of_bandwidth"] == pytest.approx(rate / record["bandwidth_gb_per_second"])
        else:
            assert record["gb_per_second"] is None
    assert found[1]["output_hash"] == found[2]["output_hash"]
    assert len({r["output_hash"] for r in found}) == 4


def test_the_formats_hold_the_same(records: dict[str, Path]) -> None:
    found = json.loads(records["json"].read_text())
    assert output.read(records["jsonl"]) == output.read(records["json"]) == found
    with records["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["output_hash"] for row in rows] == [r["output_hash"] for r in found]
    assert json.loads(rows[0]["samples_ns"]) == found[0]["samples_ns"]
    table = records["md"].read_text().splitlines()
    assert [len(line) for line in table[:8]] == [len(table[0])] * 8
    assert found[0]["output_hash"] in table[2]
    assert "seeded KV rows" in records["md"].read_text()
    assert "Synthetic weights" in records["md"].read_text()


def test_a_faster_run_with_other_bits_is_a_failure(
    records: dict[str, Path],
    tmp_path: Path,
    small_shape: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--shape", small_shape, *TESTS, "-q", "--compare", str(records["json"])]
    assert bench.main(arguments) == 0
    assert "x the time of" in capsys.readouterr().out
    scales = np.float32(1.5)
    original = bench.pending_weights

    def other_weights(*given: Any) -> Weights:
        made = original(*given)
        norm: Any = made["layers.1.ffn_norm"]
        norm.recipe = Recipe(norm.recipe.seed, norm.recipe.table * scales)
        return made

    monkeypatch.setattr(bench, "pending_weights", other_weights)
    assert bench.main(arguments) == 3
    found = capsys.readouterr()
    assert found.err.count("bits differ: synthetic small") == 4
    assert "| synthetic small" in found.out  # the figures are printed all the same


def test_bits_that_move_within_the_run_exit_with_3(
    small_shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hashes = iter(["aa", "aa", "aa", "aa", "bb", "aa"])
    monkeypatch.setattr(Runner, "output_hash", lambda *_: next(hashes))
    file = tmp_path / "r.json"
    assert bench.main(["--shape", small_shape, *TESTS, "-q", "-o", str(file)]) == 3
    found = capsys.readouterr()
    assert "bits differ: tg4, l2exact: repeat 2 gave output hash bb" in found.err
    assert [r["test"] for r in json.loads(file.read_text())] == ["pp12"]  # what was known before


def test_changed_bits_are_named_across_devices() -> None:
    keys: dict[str, Any] = {"contract": "1", "weights": "w", "seed": 0, "fill_version": 1}
    keys |= {"n_prompt": 0, "n_gen": 4, "n_depth": 0, "bits_promised": True, "model_filename": "m"}
    keys |= {"test": "tg4", "test_time": "then", "build_commit": "c"}
    old = [{**keys, "device": "cuda:0", "output_hash": "a"}]
    new = [{**keys, "device": "cpu", "output_hash": "b"}]
    (line,) = changed_bits(new, old)
    assert line == "m tg4 on cpu: output hash b, before a on cuda:0 (then, commit c)"
    assert changed_bits([{**new[0], "contract": "2"}], old) == []
    assert changed_bits([{**new[0], "bits_promised": False}], old) == []


def test_a_real_folder(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["-m", str(model_folder), "-p", "3", "-n", "2", "-r", "1", "-t", "1"]) == 0
    found = capsys.readouterr()
    assert "| qwen3_moe qwen3_moe q4local" in found.out
    assert "Synthetic" not in found.out
    assert "kestrel: qwen3_moe: tg2, l2exact:" in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen9"], "unknown shape 'qwen9': choose from"),
        (["--shape", "smollm2-135m", "-p", "0", "-n", "0"], "nothing to time"),
        (["--shape", "small", "-d", "1020"], "need 1532 positions, synthetic small has 1024"),
        (["--shape", "small", "-o", "x.txt"], "the format follows from the ending: .md, .json, .jsonl, .csv"),
        (["--shape", "small", "-o", "/no/such/folder/x.md"], "there is no folder"),
        (["--shape", "small", "--eager"], "--eager needs a GPU"),
        (["--shape", "small", "--device", "tpu"], "unknown device 'tpu'"),
        (["--shape", "small", "--mode", "exact"], "unknown mode 'exact': choose from"),
        (["--shape", "small", "-d", "0,many"], "invalid list value: '0,many'"),
        (["--shape", "small", "-d", "-1"], "-d"),
        (["--shape", "small", "-r", "0"], "must be at least 1"),
        (["--shape", "small", "--repeat", "3"], "unknown argument --repeat"),
    ],
)
def test_wrong_usage(
    small_shape: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_modes_of_the_cpu_are_measured_once(small_shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["-p", "0", "-n", "2", "-r", "1", "-t", "1", "-q"]
    assert cli.main(["bench", "--shape", small_shape, "--mode", "fast,l2exact", *tests]) == 0
    found = capsys.readouterr()
    assert "every mode runs the exact reference: measured once" in found.err
    assert found.out.count("| tg2") == 1


def test_an_interrupted_run_keeps_what_it_has(
    small_shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> tuple[float, list[int]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "generate", interrupted)
    file = tmp_path / "r.json"
    assert cli.main(["bench", "--shape", small_shape, *TESTS, "-q", "-o", str(file)]) == 130
    assert "| pp12 " in capsys.readouterr().out
    assert [r["test"] for r in json.loads(file.read_text())] == ["pp12"]


def test_the_environment_chooses_mode_and_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    args = bench.build_parser().parse_args(["--eager", "--dump"])
    assert bench.variants(args, True) == [
        Variant(),
        Variant(graph=False),
        Variant(taps="standard"),
    ]
    monkeypatch.setenv("KESTREL_L2EXACT", "0")
    monkeypatch.setenv("KESTREL_CUDA_GRAPH", "0")
    found = bench.variants(args, True)
    assert found == [Variant("fast", False), Variant("fast", False, "standard")]
    assert [c.label for group in plan_cells(found, 16, 8, [0]) for c in group] == ["pp16", "tg8", "tg8"]
    args = bench.build_parser().parse_args(["--mode", "l2exact,fast"])
    assert [variant.mode for variant in bench.variants(args, True)] == ["l2exact", "fast"]


def test_unreadable_records_are_named(
    small_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"output_hash": "a", "samples_ns": []}\n{\n')
    assert cli.main(["bench", "--shape", small_shape, "--compare", str(tmp_path / "a.jsonl")]) == 1
    assert "a.jsonl, line 2 is not JSON" in capsys.readouterr().err
    assert cli.main(["bench", "--shape", small_shape, "--compare", str(tmp_path / "absent.json")]) == 1
    assert "absent.json cannot be read" in capsys.readouterr().err


def test_every_flag_is_documented() -> None:
    text = (REPOSITORY / "docs" / "bench.md").read_text(encoding="utf-8")
    actions = bench.build_parser()._actions
    flags = {flag for action in actions for flag in action.option_strings} - {"-h", "--help", "--version"}
    assert {flag for flag in flags if not re.search(rf"`?{flag}(?![\w-])", text)} == set()
    from kestrel.benchmark.shapes import SHAPES

    assert [name for name in SHAPES if name != "small" and f"`{name}`" not in text] == []
