"""The converter: bounded memory, all or nothing, reproducible, and clear about what it does not do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kestrel.checkpoints.folder_writer
import kestrel.convert
from kestrel.checkpoints.manifest import read_manifest
from kestrel.checkpoints.quantize import quantize
from kestrel.checkpoints.safetensors_file import read_header
from kestrel.cli import run_command
from kestrel.convert import convert, main, summarise
from kestrel.errors import KestrelError, ModelError, UsageError
from kestrel.ops import WType
from kestrel.weights import QuantTensor, load_model_folder
from tests.checkpoint.files import assert_equal_bits, edit_json, faults_of, write_safetensors
from tests.support.folders import clean_environment
from tests.support.models import random_hf_tensors, write_hf_model

SHAPE: dict[str, Any] = {
    "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 300,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2, "moe_ffn": 32}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf_model(tmp_path / "hf", "qwen3_moe", **SHAPE, **EXPERTS)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def wtypes_of(folder: Path) -> dict[str, str]:
    return {name: record.wtype for name, record in read_manifest(folder).tensors.items()}


# -- formats -------------------------------------------------------------------------------------------------


def test_default_formats(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "k")
    wtypes = wtypes_of(tmp_path / "k")
    assert wtypes["embed"] == wtypes["head"] == "q8local"
    assert wtypes["layers.0.router"] == "bf16"
    assert {wtypes[f"layers.1.{leaf}"] for leaf in ("attn_norm", "ffn_norm", "q_norm", "k_norm")} == {"f32"}
    assert {wtypes[f"layers.1.{leaf}"] for leaf in ("q", "k", "v", "o", "experts.gate", "experts.down")} == {
        "q4local"
    }


@pytest.mark.parametrize(
    ("wtype", "head", "expected"),
    [
        ("q4local", None, ("q4local", "q8local")),
        ("q8local", None, ("q8local", "q8local")),
        ("bf16", None, ("bf16", "bf16")),
        ("q4local", "q4local", ("q4local", "q4local")),
        ("q8local", "bf16", ("q8local", "bf16")),
        ("bf16", "q8local", ("bf16", "q8local")),
    ],
)
def test_formats_by_flag(
    hf: Path, tmp_path: Path, wtype: str, head: str | None, expected: tuple[str, str]
) -> None:
    arguments = [str(hf), str(tmp_path / "k"), "--wtype", wtype, *(["--head-wtype", head] if head else [])]
    assert main([*arguments, "-q"]) == 0
    wtypes = wtypes_of(tmp_path / "k")
    assert (wtypes["layers.0.q"], wtypes["head"]) == expected
    assert wtypes["embed"] == wtypes["head"]


@pytest.mark.parametrize("scale", ["plain", "search", "weighted"])
def test_stored_tensors_are_the_quantisers(hf: Path, tmp_path: Path, scale: Any) -> None:
    convert(hf, tmp_path / "k", q4_scale=scale)
    source = random_hf_tensors("qwen3_moe", **SHAPE, **EXPERTS, dense_layers=(), tie=False, seed=0)
    values = source["model.layers.0.self_attn.q_proj.weight"].astype("bfloat16").astype(np.float32)
    _, weights = load_model_folder(tmp_path / "k")
    stored, expected = weights["layers.0.q"], quantize(values, WType.q4local, scale)
    assert isinstance(stored, QuantTensor)
    assert_equal_bits(stored.codes, expected.codes)
    assert stored.scale is not None
    assert expected.scale is not None
    assert_equal_bits(stored.scale, expected.scale)
    assert read_manifest(tmp_path / "k").q4_scale == scale


def test_rows_that_do_not_divide_into_groups_stay_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hf_model(tmp_path / "hf", "llama", **{**SHAPE, "ffn": 72})
    assert main([str(tmp_path / "hf"), str(tmp_path / "k")]) == 0
    wtypes = wtypes_of(tmp_path / "k")
    assert (wtypes["layers.0.down"], wtypes["layers.0.up"]) == ("bf16", "q4local")
    shown = capsys.readouterr()
    assert "kept in bf16, their rows being no multiple of 32 weights: 2 tensors: layers.0-1.down" in shown.err
    assert shown.out == ""


def test_small_blocks_change_nothing(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(hf, tmp_path / "a", threads=1)
    monkeypatch.setattr(kestrel.convert, "_BLOCK", 5 * 64)  # blocks that end inside experts and heads
    convert(hf, tmp_path / "b", threads=3)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_same_source_gives_the_same_bytes(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    hf.rename(tmp_path / "elsewhere" / "renamed")
    write_hf_model(hf, "qwen3_moe", **SHAPE, **EXPERTS)
    convert(hf, tmp_path / "a")
    convert(tmp_path / "elsewhere" / "renamed", tmp_path / "elsewhere" / "b")
    a, b = files_of(tmp_path / "a"), files_of(tmp_path / "elsewhere" / "b")
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []
    assert str(tmp_path).encode() not in a["kestrel.json"]


def test_layout_is_aligned(hf: Path, tmp_path: Path) -> None:
    for wtype in WType:
        convert(hf, tmp_path / wtype.name, wtype=wtype)
        header = read_header(tmp_path / wtype.name / "model.safetensors")
        assert header.data_begin % 64 == 0
        for entry in header.tensors.values():
            assert entry.begin % min(64, entry.nbytes & -entry.nbytes) == 0, entry


def test_manifest(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "k")
    manifest = read_manifest(tmp_path / "k")
    assert (manifest.source_format, manifest.wtype, manifest.head_wtype) == (
        "hugging-face",
        "q4local",
        "q8local",
    )
    (source,) = manifest.sources
    data = (hf / "model.safetensors").read_bytes()
    assert (source.name, source.bytes) == ("model.safetensors", len(data))
    assert source.sha256 == hashlib.sha256(data).hexdigest()
    assert manifest.tensors["layers.0.q"].source == "BF16"
    assert json.loads((tmp_path / "k" / "kestrel.json").read_text())["format_version"] == 1


def test_fingerprint_names_the_weights(hf: Path, tmp_path: Path) -> None:
    write_hf_model(tmp_path / "other", "qwen3_moe", **SHAPE, **EXPERTS, seed=1)
    prints = []
    for source, name, wtype in ((hf, "a", "q4local"), (hf, "b", "q4local"), (hf, "c", "q8local")):
        convert(source, tmp_path / name, wtype=WType[wtype])
        prints.append(read_manifest(tmp_path / name).fingerprint)
    convert(tmp_path / "other", tmp_path / "d")
    prints.append(read_manifest(tmp_path / "d").fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_side_files_are_copied(hf: Path, tmp_path: Path) -> None:
    (hf / "special_tokens_map.json").write_text("{}")
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (hf / "README.md").write_text("not copied")
    convert(hf, tmp_path / "k")
    made = [path for path in (tmp_path / "k").rglob("*") if path.is_file()]
    copied = {path.relative_to(tmp_path / "k").as_posix() for path in made}
    copied -= {"kestrel.json", "model.safetensors"}
    assert {record.name for record in read_manifest(tmp_path / "k").files} == copied
    assert copied == {
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in copied:
        assert (tmp_path / "k" / name).read_bytes() == (hf / name).read_bytes()


def test_progress_goes_to_the_end(hf: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert(hf, tmp_path / "k", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_no_bar_without_a_terminal(hf: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kestrel.convert", hf, tmp_path / "k"],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=True,
    )
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert "converting" not in done.stderr
    assert "tensors (" in done.stderr


# -- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wtype", list(WType))
def test_every_tensor_with_a_weight_that_is_not_finite_is_named(tmp_path: Path, wtype: WType) -> None:
    values = random_hf_tensors("qwen3", **SHAPE, **EXPERTS, dense_layers=(), tie=False, seed=0)
    q, norm = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"
    head = "lm_head.weight"
    values[q][100, 3], values[norm][5], values[head][299, :2] = np.nan, -np.inf, np.inf
    write_hf_model(tmp_path / "hf", "qwen3", **SHAPE, edit={name: values[name] for name in (q, norm, head)})
    assert faults_of(convert, tmp_path / "hf", tmp_path / "k", wtype=wtype) == [
        f"layers.0.q ({q}): 1 weight is NaN or infinite",
        f"layers.1.attn_norm ({norm}): 1 weight is NaN or infinite",
        f"head ({head}): 2 weights are NaN or infinite",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_damaged_source_leaves_nothing(hf: Path, tmp_path: Path) -> None:
    edit_json(hf / "config.json", attention_bias=True)
    with pytest.raises(ModelError, match="attention_bias"):
        convert(hf, tmp_path / "k")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_source_that_shrinks_while_it_is_read(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = kestrel.convert.lay_out

    def shrink_then_lay_out(*arguments: Any) -> Any:
        os.truncate(hf / "model.safetensors", 5000)
        return original(*arguments)

    monkeypatch.setattr(kestrel.convert, "lay_out", shrink_then_lay_out)
    with pytest.raises(ModelError, match="became shorter while it was read"):
        convert(hf, tmp_path / "k")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("destination", ["hf", "hf/.", ".", "missing/k", "k.partial-12", ""])
def test_destination_refused(hf: Path, tmp_path: Path, destination: str) -> None:
    for force in (False, True):
        with pytest.raises(UsageError):
            convert(hf, tmp_path / destination if destination else "", force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_source_inside_the_destination(tmp_path: Path) -> None:
    """With --force such a destination would take its source away."""
    write_hf_model(tmp_path / "outer" / "hf", "qwen3", **SHAPE)
    (tmp_path / "outer" / "kestrel.json").write_text("{}")
    with pytest.raises(UsageError, match="nor a folder that holds it"):
        convert(tmp_path / "outer" / "hf", tmp_path / "outer", force=True)


def test_existing_destination_needs_force(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "k")
    before = files_of(tmp_path / "k")
    with pytest.raises(UsageError, match="exists; choose another destination, or replace it with --force"):
        convert(hf, tmp_path / "k", wtype=WType.q8local)
    assert files_of(tmp_path / "k") == before
    convert(hf, tmp_path / "k", wtype=WType.q8local, force=True)
    assert wtypes_of(tmp_path / "k")["layers.0.q"] == "q8local"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "k"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_force_replaces_only_kestrel_folders(hf: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "precious"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not a kestrel folder, so --force does not replace it"):
        convert(hf, target, force=True)
    assert target.is_file() or (target / "mine.txt").read_text() == "mine"


def test_failed_replacement_keeps_the_old_folder(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "k")
    before = files_of(tmp_path / "k")
    edit_json(hf / "config.json", hidden_size=65)
    with pytest.raises(ModelError):
        convert(hf, tmp_path / "k", force=True)
    assert files_of(tmp_path / "k") == before


def test_full_disk_is_named_with_numbers(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kestrel.checkpoints.folder_writer.shutil,
        "disk_usage",
        lambda path: type("Usage", (), {"free": 1000})(),
    )
    with pytest.raises(KestrelError, match=r"needs 0\.00 GB, but only 0\.00 GB are free"):
        convert(hf, tmp_path / "k")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_disk_that_fills_up_meanwhile(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kestrel.convert, "write_at", full)
    with pytest.raises(KestrelError, match=r"nothing was kept: .*No space left on device"):
        convert(hf, tmp_path / "k")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_folders_left_by_killed_conversions_are_named(hf: Path, tmp_path: Path) -> None:
    gone, own = tmp_path / "k.partial-99999999", tmp_path / f"k.partial-{os.getpid()}"
    gone.mkdir()
    own.mkdir()
    (own / "model.safetensors").write_text("of an earlier process with this number")
    (tmp_path / f"k.partial-{os.getppid()}").mkdir()  # a conversion that may still run
    notes = convert(hf, tmp_path / "k").notes
    assert notes == [f"left by interrupted conversions, may be deleted: {gone}"]
    assert not own.exists()


def test_unknown_scale_choice(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="q4_scale must be one of plain, search, weighted, not 'best'"):
        convert(hf, tmp_path / "k", q4_scale="best")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "cannot be read: No such file"),
        ("empty", "is neither a Hugging Face folder"),
        ("text.txt", r"is not a GGUF file \(wrong magic\)"),
        ("model.safetensors", "is one file of a checkpoint"),
        ("holds", "to convert a GGUF file, name it"),
        ("k", "is a kestrel folder already"),
    ],
)
def test_not_a_source(hf: Path, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "holds").mkdir()
    (tmp_path / "holds" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "text.txt").write_text("hello")
    write_safetensors(tmp_path / "model.safetensors", {}, b"")
    convert(hf, tmp_path / "k")
    with pytest.raises(ModelError, match=words):
        convert(tmp_path / name, tmp_path / "out")


def test_model_in_the_hub_cache(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "home" / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    hf.rename(repository / "snapshots" / "abc123")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    convert("org/name", tmp_path / "k")
    load_model_folder(tmp_path / "k")
    with pytest.raises(ModelError, match="fetch it with `hf download org/other`"):
        convert("org/other", tmp_path / "k2")


def test_exit_codes(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(*arguments: Any) -> int:
        return run_command(main, [str(a) for a in arguments])

    assert code(hf, tmp_path / "k", "-q") == 0
    assert code(hf, tmp_path / "k") == 2
    assert code(hf) == 2
    assert code(hf, tmp_path / "k2", "--wtype", "q5local") == 2
    assert code(hf, tmp_path / "k2", "--unknown") == 2
    assert code(hf, tmp_path / "k2", "-t", "0") == 2
    assert code(tmp_path / "missing", tmp_path / "k2") == 1
    assert "error: " in capsys.readouterr().err


# -- interrupted ---------------------------------------------------------------------------------------------

KILLED = """
    import os, signal, sys
    import kestrel.convert as c
    from kestrel.cli import run_command

    source, target, name, call, signal_number = sys.argv[1:]
    real, calls = getattr(c, name), 0

    def interrupted(*arguments):
        global calls
        calls += 1
        result = None if name == "put_in_place" else real(*arguments)
        if calls == int(call):
            os.kill(os.getpid(), int(signal_number))
        return real(*arguments) if name == "put_in_place" else result

    setattr(c, name, interrupted)
    sys.exit(run_command(c.main, [source, target, "--force", "-q"]))
"""


MOMENTS = [
    ("lay_out", 1),
    ("write_at", 1),
    ("write_at", 20),
    ("write_file", 1),
    ("write_file", 5),  # the manifest
    ("sync_folder", 1),
    ("put_in_place", 1),
]


@pytest.mark.parametrize(
    ("moment", "signal_number", "replacing"),
    [
        *((moment, number, False) for moment in MOMENTS for number in (signal.SIGINT, signal.SIGKILL)),
        *((moment, signal.SIGTERM, False) for moment in MOMENTS[2:5]),
        *((moment, number, True) for moment in MOMENTS[4:] for number in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_interrupted_at(
    hf: Path, tmp_path: Path, moment: tuple[str, int], signal_number: int, replacing: bool
) -> None:
    """Nothing that loads is left, an old folder stays whole, and only SIGKILL leaves the partial folder."""
    target = tmp_path / "k"
    before = None
    if replacing:
        convert(hf, target, wtype=WType.bf16)
        before = files_of(target)
    name, call = moment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), hf, target, name, str(call), str(int(signal_number))],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(signal_number)]
    assert done.returncode == expected, done.stderr
    assert "Traceback" not in done.stderr
    left = {path.name: path for path in tmp_path.iterdir()}
    assert left.pop("hf")
    if replacing:
        assert files_of(left.pop("k")) == before
    if signal_number != signal.SIGKILL:
        assert left == {}
    for path in left.values():
        assert ".partial-" in path.name
        with pytest.raises(ModelError, match="interrupted conversion"):
            load_model_folder(path)


# -- memory --------------------------------------------------------------------------------------------------

MEASURED = """
    import resource, sys
    import kestrel.convert, kestrel.weights
    from kestrel.ops import WType

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    start = peak()
    if sys.argv[1] == "convert":
        kestrel.convert.convert(sys.argv[2], sys.argv[3], wtype=WType.q8local, threads=2)
    else:
        config, weights = kestrel.weights.load_model_folder(sys.argv[2])
        assert weights["embed"].codes[12345, 3, 4] == 0
    print(peak() - start)
"""


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A tensor of 268 MB converts in far less than that, and loading it reads next to nothing.

    The checkpoint is a sparse file: zeros that take no disk.
    """
    vocab, hidden = 131072, 1024
    write_hf_model(tmp_path / "hf", "llama", **{**SHAPE, "layers": 1}, tie=True)
    edit_json(
        tmp_path / "hf" / "config.json",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=32,
        head_dim=32,
    )
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
        "model.layers.0.input_layernorm.weight": [hidden],
        "model.layers.0.post_attention_layernorm.weight": [hidden],
        "model.layers.0.self_attn.q_proj.weight": [128, hidden],
        "model.layers.0.self_attn.k_proj.weight": [64, hidden],
        "model.layers.0.self_attn.v_proj.weight": [64, hidden],
        "model.layers.0.self_attn.o_proj.weight": [hidden, 128],
        "model.layers.0.mlp.gate_proj.weight": [32, hidden],
        "model.layers.0.mlp.up_proj.weight": [32, hidden],
        "model.layers.0.mlp.down_proj.weight": [hidden, 32],
    }
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    path = tmp_path / "hf" / "model.safetensors"
    write_safetensors(path, header, b"")
    os.truncate(path, path.stat().st_size + at)

    def grown(*arguments: Any) -> int:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MEASURED), *map(str, arguments)],
            capture_output=True,
            text=True,
            env=clean_environment(),
            check=True,
        )
        return int(done.stdout) * 1024

    assert grown("convert", tmp_path / "hf", tmp_path / "k") < 160e6
    assert (tmp_path / "k" / "model.safetensors").stat().st_size > 140e6
    assert grown("load", tmp_path / "k") < 20e6


# -- report --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["embed"], "1 tensor: embed"),
        ([f"layers.{i}.{x}" for i in range(3) for x in "qk"], "6 tensors: layers.0-2.{q,k}"),
        (["layers.0.q", "layers.2.q", "layers.1.k"], "3 tensors: layers.[0,2].q layers.1.k"),
        (["embed", "layers.5.experts.up"], "2 tensors: embed layers.5.experts.up"),
    ],
)
def test_summarise(names: list[str], text: str) -> None:
    assert summarise(names) == text
