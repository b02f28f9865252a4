"""L2 dumps: equal text for equal bits, and finding planted differences."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kestrel import cli
from kestrel.checkpoints.manifest import WEIGHTS_FILE
from kestrel.checkpoints.safetensors_file import read_header
from kestrel.cli import run_command
from kestrel.errors import KestrelError
from kestrel.l2 import main
from kestrel.l2_diff import compare, report
from kestrel.l2_dump import Dump, read_dump
from kestrel.l2_fields import BY_NAME, FIELDS, Key, input_keys, markdown, parse_key
from kestrel.l2_tensor import ulp_distance
from kestrel.llm import LLM
from tests.support.folders import converted_model, run_kestrel
from tests.support.shared import REPOSITORY

PROMPT = ["-p", "The kestrel hovers", "--raw", "-n", "4", "-c", "64", "-q"]


@pytest.fixture(scope="module")
def dumps(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``standard`` and ``extended``, dumps of one run."""
    folder = tmp_path_factory.mktemp("dumps")
    for level in ("standard", "extended"):
        dump(model_folder, folder / level, "-t", "1", "--l2-level", level)
    return folder


def dump(model: Path, target: Path, *flags: str) -> Path:
    assert run_command(main, ["dump", str(target), "-m", str(model), *PROMPT, *flags]) == 0
    return target


def hashes(path: Path) -> str:
    return "".join(line for line in path.read_text().splitlines(True) if not line.startswith("#"))


def changed(source: Path, target: Path, replace: dict[str, str | None]) -> Path:
    """A copy of a dump: hashes replaced by key, keys with None removed, the end line kept right."""
    lines = []
    for line in source.read_text().splitlines():
        key, _, value = line.partition(" ")
        new = replace.get(key, value)
        if line.startswith("#"):
            lines.append(line)
        elif new is not None:
            lines.append(f"{key} {new}")
    count = sum(not line.startswith("#") for line in lines)
    lines = [f"# end {count}" if line.startswith("# end ") else line for line in lines]
    target.write_text("\n".join(lines) + "\n")
    return target


def diff(a: Path, b: Path, *flags: str, capsys: pytest.CaptureFixture[str], code: int) -> str:
    capsys.readouterr()
    assert run_command(main, ["diff", str(a), str(b), *flags]) == code
    out, err = capsys.readouterr()
    return out if code != 1 else err


# -- dumps ---------------------------------------------------------------------------------------------------


def test_dumps_are_equal_as_text(model_folder: Path, dumps: Path, tmp_path: Path) -> None:
    """Processes, instruction sets, threads, chunks and modes: the lines below the header do not change."""
    expected = hashes(dumps / "standard")
    for i, flags in enumerate(
        [
            ["-t", "2"],
            ["-t", "1", "--isa", "scalar", "--chunk", "1"],
            ["-t", "2", "--chunk", "3", "--mode", "fast"],
        ]
    ):
        done = run_kestrel("l2", "dump", tmp_path / str(i), "-m", model_folder, *PROMPT, *flags)
        assert done.returncode == 0, done.stderr
        assert hashes(tmp_path / str(i)) == expected


def test_decode_dumps_by_flag_and_by_variable(model_folder: Path, dumps: Path, tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    command = ["decode", "-m", model_folder, *PROMPT]
    plain = run_kestrel(*command)
    runs = [
        run_kestrel(*command, "--l2-dump", a),
        run_kestrel(*command, env={"KESTREL_L2_DUMP": str(b)}),
        run_kestrel(*command, "--l2-dump", c, env={"VLLM_L2_DUMP": str(tmp_path / "not")}),
    ]
    assert {run.stdout for run in runs} == {plain.stdout}
    assert hashes(a) == hashes(b) == hashes(c) == hashes(dumps / "standard")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]  # a flag beats a variable
    assert "VLLM_L2_DUMP is an old spelling: use KESTREL_L2_DUMP" in runs[2].stderr


def test_a_dump_may_go_to_stdout(model_folder: Path, dumps: Path) -> None:
    done = run_kestrel("l2", "dump", "-", "-m", model_folder, *PROMPT)
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines(True) if not line.startswith("#")]
    assert "".join(lines) == hashes(dumps / "standard")
    done = run_kestrel("decode", "-m", model_folder, *PROMPT, "--l2-dump", "-")
    assert (done.returncode, done.stdout) == (2, "")


def test_the_header_says_what_it_is(model_folder: Path, dumps: Path) -> None:
    from kestrel.checkpoints.manifest import read_manifest

    found = read_dump(dumps / "standard")
    assert found.header["contract"] == "2"
    assert found.header["model"] == "qwen3_moe"
    assert found.header["weights"] == read_manifest(model_folder).fingerprint
    for name in ("kestrel", "backend", "isa", "threads", "mode", "level"):
        assert name in found.header
    assert found.command is not None
    assert found.command["model"] == str(model_folder)
    assert len(found.generated or []) == 4
    assert len(found.tokens or []) == len(found.command["prompt_ids"]) + 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no keys in it"),
        ("hello world\n", "line 1: 'hello' is no key"),
        ("hello\n", "line 1: 'hello' is no key"),
        ("t0_logits\n", "line 1: '' is not a hash"),
        ("t0_l0_nrm 123\n", "line 1: '123' is not a hash"),
        ("t0_l0_nrm 000000000000000g\n", "line 1: '000000000000000g' is not a hash"),
        ("t0_logits 0000000000000000\nt0_logits 0000000000000000\n", "line 2: key t0_logits occurs twice"),
        ("t0_l0_logits 0000000000000000\n", "no key of contract section 12"),
        ("# kestrel-l2 9\nt0_logits 0000000000000000\n# end 1\n", "dump format 9"),
        ("# kestrel-l2 1\nt0_logits 0000000000000000\n", "cut off: it has no end line and holds 1 keys"),
        ("# kestrel-l2 1\nt0_logits 0000000000000000\n# end 2\n", "should hold 2 keys and holds 1"),
        ("# command {\n", "line 1"),
    ],
)
def test_files_that_are_no_dumps_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "d").write_text(text)
    with pytest.raises(KestrelError, match=message):
        read_dump(tmp_path / "d")


def test_a_missing_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KestrelError, match="none cannot be read as an L2 dump: No such file or directory"):
        read_dump(tmp_path / "none")


def test_where_a_dump_cannot_lie(
    model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Refused before the text, and a folder, a device or a link stays what it is."""
    argv = ["-m", str(model_folder), "-p", "x", "-n", "2", "-t", "1", "--l2-dump"]
    folder, pipe, link, file = (tmp_path / name for name in ("folder", "pipe", "link", "file"))
    folder.mkdir()
    for path, reason in ((folder, "Is a directory"), (tmp_path / "no" / "d", "No such file or directory")):
        assert cli.main(["decode", *argv, str(path)]) == 1
        out, err = capfd.readouterr()
        assert (out, err) == ("", f"kestrel decode: error: L2 dump {path} cannot be written: {reason}\n")
    link.symlink_to(file)
    assert cli.main(["decode", *argv, str(link)]) == 0
    assert link.is_symlink()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert cli.main(["decode", *argv, str(pipe)]) == 0
        assert reader.communicate(timeout=60)[0] == file.read_bytes()
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "pipe"]


def test_a_full_disk_is_said(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with LLM(model_folder, threads=1) as llm:
        with pytest.raises(KestrelError, match="d cannot be written: No space left on device"):
            llm.generate("x", 2, l2_dump=tmp_path / "d")
        assert list(tmp_path.iterdir()) == []
        assert llm.generate("x", 2).token_ids


def test_a_model_folder_need_not_be_unicode(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.symlink_to(model_folder)
    with LLM(folder, threads=1) as llm:
        llm.generate("x", 2, l2_dump=tmp_path / "d")
    assert read_dump(tmp_path / "d").header["model"] == "caf\\udce9"


# -- diff ----------------------------------------------------------------------------------------------------


def test_equal_dumps(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = diff(dumps / "standard", dumps / "standard", capsys=capsys, code=0)
    assert "equal: all " in text
    facts = json.loads(diff(dumps / "standard", dumps / "standard", "--json", capsys=capsys, code=0))
    assert facts["equal"] is True
    assert facts["first"] is None
    assert facts["compared"] == len(read_dump(dumps / "standard").hashes)


def test_levels_may_differ(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names in (("standard", "extended"), ("extended", "standard")):
        text = diff(*(dumps / name for name in names), capsys=capsys, code=0)
        assert "the levels differ" in text


def test_every_planted_hash_is_found_first(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong hash, whatever the field: it is the first, it is the only one, and its inputs are equal."""
    keys = [k for k in read_dump(dumps / "extended").hashes if k.startswith("t5_") and "_l0_" not in k]
    assert {parse_key(k).field for k in keys} == {f.name for f in FIELDS}
    for key in keys:
        planted = changed(dumps / "extended", tmp_path / "planted", {key: "0123456789abcdef"})
        facts = json.loads(diff(dumps / "extended", planted, "--json", capsys=capsys, code=3))
        assert (facts["first"]["key"], facts["differ"]) == (key, 1)
        assert facts["first"]["inputs_equal"] is True
        assert facts["first"]["hash_b"] == "0123456789abcdef"
        field = parse_key(key).field
        assert facts["first"]["operation"] == BY_NAME[field].operation
        assert facts["fields"][field]["origins"] == 1


def test_a_cause_is_told_from_its_effects(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["t2_l0_ores", "t2_l0_x", "t2_l1_nrm", "t2_logits", "t3_l1_attn"]
    planted = changed(dumps / "standard", tmp_path / "planted", dict.fromkeys(keys, "0" * 16))
    facts = json.loads(diff(dumps / "standard", planted, "--json", capsys=capsys, code=3))
    assert facts["first"]["key"] == "t2_l0_ores"
    origins = {name: t["origins"] for name, t in facts["fields"].items() if t["differ"]}
    # x and nrm follow from ores; logits and the attention at position 3 have equal inputs of their own.
    assert origins == {"nrm": 0, "attn": 1, "ores": 1, "x": 0, "logits": 1}
    assert {name: t["differ"] for name, t in facts["layers"].items()} == {"0": 2, "1": 2, "after": 1}
    text = diff(dumps / "standard", planted, capsys=capsys, code=3)
    assert "first difference: t2_l0_ores: a " in text
    assert "position 2, layer 0: matmul o, residual add" in text
    assert "its inputs were equal: this operation made the difference: t2_l0_attn (equal)" in text


def test_attention_depends_on_earlier_cache_rows(dumps: Path, tmp_path: Path) -> None:
    planted = changed(
        dumps / "standard", tmp_path / "planted", {"t1_l1_ks": "0" * 16, "t4_l1_attn": "0" * 16}
    )
    result = compare(read_dump(dumps / "standard"), read_dump(planted))
    assert result.fields["attn"].origins == 0
    assert result.fields["ks"].origins == 1


def test_the_first_difference_does_not_depend_on_line_order(dumps: Path, tmp_path: Path) -> None:
    planted = changed(dumps / "standard", tmp_path / "planted", {"t3_l1_v": "0" * 16, "t7_l0_nrm": "0" * 16})
    lines = planted.read_text().splitlines(True)
    head = [line for line in lines if line.startswith("#")]
    body = [line for line in lines if not line.startswith("#")]
    random.Random(1).shuffle(body)
    planted.write_text("".join([*head, *body]))
    first = compare(read_dump(dumps / "standard"), read_dump(planted)).first
    assert first is not None
    assert str(first.key) == "t3_l1_v"


def test_missing_and_extra_keys(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shorter = changed(dumps / "standard", tmp_path / "shorter", {"t1_l0_k": None, "t4_fnorm": None})
    for pair, side in (((dumps / "standard", shorter), "b"), ((shorter, dumps / "standard"), "a")):
        facts = json.loads(diff(*pair, "--json", capsys=capsys, code=3))
        assert facts["only_a" if side == "b" else "only_b"] == ["t1_l0_k", "t4_fnorm"]
        assert (facts["differ"], facts["first"]["key"]) == (0, "t1_l0_k")
        assert facts["first"][f"hash_{side}"] is None
        assert f"missing in {side}: 2 keys: t1_l0_k, t4_fnorm" in diff(*pair, capsys=capsys, code=3)


def test_other_prompts_are_seen_by_their_tokens(model_folder: Path, dumps: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    flags = ["-m", str(model_folder), "-p", "The kestrel waits!", *PROMPT[2:]]
    assert run_command(main, ["dump", str(other), *flags]) == 0
    result = compare(read_dump(dumps / "standard"), read_dump(other))
    assert result.first is not None
    assert result.first_other_token == result.first.key.position > 0
    assert str(result.first.key).endswith("_l0_nrm")
    assert result.first.inputs_equal is False
    assert f"token id at position {result.first_other_token} (different)" in report(result)
    assert f"first other token: position {result.first_other_token} (prompt)" in report(result)


def test_other_contracts_and_models_are_refused_by_name(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (dumps / "standard").read_text()
    weights = read_dump(dumps / "standard").header["weights"]
    (tmp_path / "contract").write_text(text.replace("# contract 2\n", "# contract 1\n"))
    other = text.replace(weights, "0" * 16).replace("# model qwen3_moe", "# model other")
    (tmp_path / "model").write_text(other)
    message = diff(dumps / "standard", tmp_path / "contract", capsys=capsys, code=1)
    assert "dumps of different numerics contracts are not compared: " in message
    assert f"{dumps / 'standard'}: 2; {tmp_path / 'contract'}: 1" in message
    message = diff(dumps / "standard", tmp_path / "model", capsys=capsys, code=1)
    assert f"qwen3_moe (weights {weights})" in message
    assert f"other (weights {'0' * 16})" in message


def test_dumps_without_common_keys_are_refused(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "far").write_text("t900_logits 0000000000000000\n")
    assert "no key in common" in diff(dumps / "standard", tmp_path / "far", capsys=capsys, code=1)


def test_a_dump_without_header_is_compared(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").write_text(hashes(dumps / "standard"))
    assert "(no header)" in diff(dumps / "standard", tmp_path / "bare", capsys=capsys, code=0)
    # Only generated positions, as other programs dump them: the cache before them is unknown.
    every = hashes(dumps / "standard").splitlines(True)
    late = [line for line in every if not line.startswith(("t0_", "t1_"))]
    (tmp_path / "late").write_text("".join(late))
    (tmp_path / "planted").write_text("".join(late).replace("t2_l1_attn ", "t2_l1_attn 0", 1))
    lines = (tmp_path / "planted").read_text().splitlines()
    (tmp_path / "planted").write_text("\n".join(line[: line.index(" ") + 17] for line in lines) + "\n")
    result = compare(read_dump(tmp_path / "late"), read_dump(tmp_path / "planted"))
    assert result.first is not None
    assert str(result.first.key) == "t2_l1_attn"
    assert result.first.inputs_equal is None


# -- a flipped bit, and the tensor behind a key --------------------------------------------------------------


@pytest.fixture(scope="module")
def flipped_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with one bit of one weight of layer 1's o projection flipped; the manifest does not know."""
    folder = tmp_path_factory.mktemp("flipped") / "qwen3_moe"
    shutil.copytree(model_folder, folder)
    path = folder / WEIGHTS_FILE
    header = read_header(path)
    data = bytearray(path.read_bytes())
    data[header.tensors["layers.1.o.codes"].begin] ^= 1
    path.write_bytes(data)
    return folder


def test_a_flipped_weight_bit_is_found(
    model_folder: Path, flipped_folder: Path, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = dump(flipped_folder, tmp_path / "other", "-t", "2", "--chunk", "3")
    flags = ["--tensor", "first", "--out", str(tmp_path / "saved")]
    facts = json.loads(diff(dumps / "standard", other, "--json", *flags, capsys=capsys, code=3))
    assert facts["first"]["key"] == "t0_l1_ores"
    assert facts["first"]["inputs_equal"] is True
    assert facts["layers"]["0"]["differ"] == 0
    tensor = facts["tensor"]
    assert (tensor["key"], tensor["differ"], tensor["elements"]) == ("t0_l1_ores", 1, 96)
    assert tensor["reproduced_a"] is tensor["reproduced_b"] is True
    (element,) = tensor["first"]
    assert element["index"] == 0  # the first row of o
    a, b = np.load(tensor["file_a"]), np.load(tensor["file_b"])
    assert a.dtype == b.dtype == np.float32
    assert np.flatnonzero(a.view(np.uint32) != b.view(np.uint32)).tolist() == [0]
    assert element["bits_a"] == f"{a.view(np.uint32)[0]:08x}"
    assert element["ulp"] == tensor["largest_ulp"] == int(ulp_distance(a, b)[0]) > 0
    text = diff(dumps / "standard", other, *flags, capsys=capsys, code=3)
    assert "t0_l1_ores: 1 of 96 elements differ" in text
    assert element["bits_b"] in text
    # Any key may be asked for, a generated position's too, and one that is equal.
    for key, count in (("t0_l1_attn", 0), ("t5_l0_rids", 0)):
        argv = ["--json", "--tensor", key, "--out", str(tmp_path)]
        facts = json.loads(diff(dumps / "standard", other, *argv, capsys=capsys, code=3))
        assert facts["tensor"]["differ"] == count
    last = max(parse_key(k).position for k in read_dump(other).hashes)
    argv = ["--json", "--tensor", f"t{last}_logits", "--out", str(tmp_path)]
    facts = json.loads(diff(dumps / "standard", other, *argv, capsys=capsys, code=3))
    assert facts["tensor"]["reproduced_a"] is facts["tensor"]["reproduced_b"] is True


def test_a_tensor_that_is_not_reproduced_is_said(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = changed(dumps / "standard", tmp_path / "planted", {"t1_l0_nrm": "0" * 16})
    argv = ["--tensor", "t1_l0_nrm", "--out", str(tmp_path)]
    text = diff(dumps / "standard", planted, *argv, capsys=capsys, code=3)
    assert "t1_l0_nrm: 0 of 96 elements differ" in text
    assert text.count("NOT as recorded: 0000000000000000") == 1


def test_models_that_moved(
    model_folder: Path, flipped_folder: Path, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    text = (dumps / "standard").read_text()
    moved.write_text(text.replace(f'"model": "{model_folder}"', f'"model": "{tmp_path}/gone"'))
    argv = ["--tensor", "t0_fnorm", "--out", str(tmp_path)]
    message = diff(dumps / "standard", moved, *argv, capsys=capsys, code=1)
    assert f"{tmp_path}/gone does not exist" in message
    other = converted_model(tmp_path, "llama")
    message = diff(dumps / "standard", moved, *argv, "--model-b", str(other), capsys=capsys, code=1)
    assert f"was made with weights {read_dump(moved).header['weights']}, {other} has " in message
    argv += ["--json", "--model-b", str(flipped_folder)]
    facts = json.loads(diff(dumps / "standard", moved, *argv, capsys=capsys, code=0))
    assert facts["tensor"]["differ"] > 0  # the flipped model, though the dumps are equal
    assert facts["tensor"]["reproduced_b"] is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor", "t0_l0_nonsense"], "is no key of contract section 12"),
        (["--tensor", "t999_logits"], "position 999 is not in a run of"),
        (["--tensor", "t0_l9_nrm"], "no value t0_l9_nrm"),
        (["--model-a", "x"], "belong to --tensor"),
    ],
)
def test_wrong_tensor_flags(
    dumps: Path, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    argv = ["diff", str(dumps / "standard"), str(dumps / "standard"), "--out", str(tmp_path), *flags]
    assert run_command(main, argv) == 2
    assert message in capsys.readouterr().err


def test_ulp_distance() -> None:
    def f32(*values: float) -> np.ndarray:
        return np.array(values, np.float32)

    tiny = np.array([1, 0x80000001], np.uint32).view(np.float32)
    assert ulp_distance(f32(1, 0.0, 1), f32(1.0000001, -0.0, -1)).tolist() == [1, 0, 2 * 0x3F800000]
    assert ulp_distance(tiny[:1], tiny[1:]).tolist() == [2]
    assert ulp_distance(np.array([-127], np.int8), np.array([127], np.int8)).tolist() == [254]


# -- the table of fields -------------------------------------------------------------------------------------


def test_the_document_holds_the_table_of_fields() -> None:
    text = (REPOSITORY / "docs" / "l2.md").read_text(encoding="utf-8")
    assert markdown() in text, "docs/l2.md is out of date: paste the output of kestrel.l2_fields.markdown()"


def test_inputs_come_before_their_field() -> None:
    names = [field.name for field in FIELDS]
    for index, field in enumerate(FIELDS):
        for name in field.inputs:
            assert name.startswith("prev.") or names.index(name) < index


def test_the_fields_are_those_of_the_model(dumps: Path) -> None:
    for level in ("standard", "extended"):
        found = list(dict.fromkeys(parse_key(key).field for key in read_dump(dumps / level).hashes))
        assert found == [f.name for f in FIELDS if level == "extended" or not f.extended]


def test_missing_inputs_are_replaced_by_their_own() -> None:
    known = {"t3_l2_nrm", "t3_l1_x", "t3_l2_attn", "t3_fnorm"}
    assert list(map(str, input_keys(parse_key("t3_l2_k"), 4, known))) == ["t3_l2_nrm"]
    assert list(map(str, input_keys(parse_key("t3_l2_ores"), 4, known))) == ["t3_l2_attn", "t3_l1_x"]
    assert list(input_keys(Key(0, 0, "nrm"), 4, known)) == []


def test_an_empty_dump_object_has_no_tokens() -> None:
    assert Dump(Path("x")).tokens is None
