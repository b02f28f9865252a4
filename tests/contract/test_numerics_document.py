"""docs/numerics.md agrees with the op registry and with the code, and this check notices when it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pytest

from kestrel import contract, launch
from kestrel.l2_fields import FIELDS
from kestrel.ops import OPS
from kestrel.taps import Tap
from tests.support.forward import make_model
from tests.support.models import tiny_config
from tests.support.shared import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "numerics.md"


@dataclass(frozen=True)
class Section:
    title: str
    anchor: str
    version: int | None
    text: str


def read_sections(text: str) -> dict[str, Section]:
    """Sections by number. Each is a heading ``## N. Title`` with a line ``Version V`` below it."""
    sections = {}
    parts = re.split(r"^## (\d+)\. (.+)$", text, flags=re.M)[1:]
    for number, title, body in zip(parts[0::3], parts[1::3], parts[2::3], strict=True):
        version = re.match(r"\n+Version (\d+)\n", body)
        anchor = re.sub(r"[^a-z0-9 -]", "", f"{number}. {title}".lower()).replace(" ", "-")
        if number in sections:
            raise AssertionError(f"section {number} occurs twice")
        sections[number] = Section(title, anchor, int(version[1]) if version else None, body)
    return sections


def op_rows(section: Section) -> dict[str, tuple[str, str, list[str]]]:
    """Op -> kernel, native file, test paths, from the table of a section."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(native/\w+\.cpp)` \| (.+) \|$", section.text, flags=re.M)
    return {op: (kernel, native, re.findall(r"`([^`]+)`", tests)) for op, kernel, native, tests in rows}


@lru_cache(maxsize=1)
def _device_code() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(REPOSITORY.glob("kernels/*.cu*")))


@lru_cache(maxsize=1)
def _native_code() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(REPOSITORY.glob("native/*.[ch]*")))


# -- the checks ----------------------------------------------------------------------------------------------


def check_versions(text: str) -> None:
    sections = read_sections(text)
    assert list(sections) == list(contract.SECTIONS), "sections in the document and in kestrel/contract.py"
    stated = re.search(r"^Contract version: \*\*(\S+)\*\*$", text, flags=re.M)
    assert stated, "the document states the contract version"
    assert stated[1] == contract.CONTRACT
    table = re.findall(r"^\| \[(\d+)\]\(#([a-z0-9-]+)\) \| .+ \| (\d+) \|$", text, flags=re.M)
    assert [number for number, _, _ in table] == list(sections)
    for number, anchor, version in table:
        section = sections[number]
        assert section.version is not None, f"section {number} has no version line"
        assert section.version == contract.SECTIONS[number] == int(version), f"version of section {number}"
        assert anchor == section.anchor, f"link to section {number}"


def check_ops(text: str) -> None:
    sections = read_sections(text)
    named = {op: number for number, section in sections.items() for op in op_rows(section)}
    assert named == {name: spec.section for name, spec in OPS.items()}
    for name, spec in OPS.items():
        kernel, native, tests = op_rows(sections[spec.section])[name]
        assert kernel == spec.kernel
        source = (REPOSITORY / native).read_text(encoding="utf-8")
        assert re.search(rf"\bvoid {name}_scalar\(", source), f"{native} does not define {name}"
        defined = re.search(rf"\bvoid (?:{kernel}|FORM\({kernel}\))\(", _device_code())
        assert defined, f"no kernel {kernel} under kernels/"
        assert tests, f"op {name} names no test"


def check_paths(text: str) -> None:
    paths = re.findall(r"`((?:native|kernels|kestrel|tests|docs|bench)/[\w./-]*)`", text)
    assert len(paths) > 30
    missing = sorted({path for path in paths if not (REPOSITORY / path).exists()})
    assert not missing, f"files named but absent: {missing}"


def check_reasons(text: str) -> None:
    for number, section in read_sections(text).items():
        assert re.search(r"^\*\*Why\.\*\* ", section.text, flags=re.M), f"section {number} gives no reason"
        assert op_rows(section) or "**Where.**" in section.text, f"section {number} does not say where"


def check_constants(text: str) -> None:
    sections = read_sections(text)
    for number, *forms in (
        ("12", f"`h = {contract.FNV_OFFSET}`", f"* {contract.FNV_PRIME} "),
        (
            "7",
            f"chunks of **{contract.ATTENTION_CHUNK}**",
            f"`j = t mod {contract.SUM_LANES}`",
            f"), {contract.VALUE_CODE_MAX})`",
            "below 2^-100",
        ),
        ("2", "below 2^-100", f"groups of {contract.GROUP} "),
        ("3", f"g mod {contract.LANES}", f"k mod {contract.SUM_LANES}"),
        ("4", f"j mod {contract.SUM_LANES}", f"i mod {contract.SUM_LANES}"),
        ("0", f"canonical NaN is 0x{contract.NAN_BITS:08x}"),
    ):
        for form in forms:
            assert form in sections[number].text, f"section {number} does not say {form!r}"
    assert contract.A8_ZERO_BELOW == 2.0**-100
    for number in ("2", "7"):
        threshold = re.search(r"`a < (0x[0-9a-f]{8})`", sections[number].text)
        assert threshold
        assert int(threshold[1], 16) == (127 - 100) << 23, f"the encoding of 2^-100 in section {number}"


def check_constants_in_code(native: str, device: str) -> None:
    for where, code in (("native/", native), ("kernels/", device)):
        for constant in (contract.FNV_OFFSET, contract.FNV_PRIME):
            assert f"{constant}ull" in code, f"{constant} is not in {where}"
    shared = (REPOSITORY / "kernels" / "contract.cuh").read_text(encoding="utf-8")
    assert f"0x{contract.NAN_BITS:08x}u" in shared
    assert "amax_bits < 0x0d800000u" in shared
    assert "(a < 0x0d800000u)" in shared
    assert f"code < {contract.VALUE_CODE_MAX} ? code : {contract.VALUE_CODE_MAX};" in shared
    assert f"kSumLanes = {contract.SUM_LANES};" in native
    assert f"kAttentionChunk = {contract.ATTENTION_CHUNK};" in native
    assert f"#define CHUNK {contract.ATTENTION_CHUNK}\n" in device
    assert launch.CHUNK == contract.ATTENTION_CHUNK
    ucrt = (REPOSITORY / "kernels" / "ucrt.cuh").read_text(encoding="utf-8")
    document = read_sections(DOCUMENT.read_text(encoding="utf-8"))["11"].text
    in_document = set(re.findall(r"0x[0-9a-f]{16}\b", document))
    in_code = set(re.findall(r"f64_from_bits\((0x[0-9a-f]{16})ull\)", ucrt))
    assert in_document == in_code, "f64 constants of section 11"


def check_fields(text: str) -> None:
    """The table of L2 fields lists the taps of a forward pass: their order, level, type and size."""
    rows = re.findall(r"^\| `(\w+)`(\+?) \| (\w+) `\[(.+?)\]` \|", read_sections(text)["12"].text, flags=re.M)
    config = tiny_config("qwen3_moe", layers=1)
    assert config.moe is not None
    model = make_model(config, slots=1, max_rows=1)
    sizes = {
        "H": config.hidden_size,
        "V": config.vocab_size,
        "nh": config.num_heads,
        "nkv": config.num_kv_heads,
        "hd": config.head_dim,
        "E": config.moe.num_experts,
        "T": config.moe.top_k,
    }
    types = {"float32": "f32", "int32": "i32", "int8": "i8"}

    def describe(tap: Tap) -> tuple[str, str, int]:
        return tap.field, types[str(tap.dtype)], tap.nbytes // tap.dtype.itemsize

    documented = []
    for field, plus, kind, shape in rows:
        count = 1
        for letter in shape.split(", "):
            count *= sizes[letter]
        documented.append((plus, (field, kind, count)))
    extended = [describe(tap) for tap in model.step(1, 1, "extended").taps]
    standard = [describe(tap) for tap in model.step(1, 1, "standard").taps]
    assert [(field, bool(plus)) for plus, (field, _, _) in documented] == [
        (f.name, f.extended) for f in FIELDS
    ]
    assert [row for _, row in documented] == extended
    assert [row for plus, row in documented if not plus] == standard


CHECKS = [check_versions, check_ops, check_paths, check_reasons, check_constants, check_fields]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_document(check: Callable[[str], None]) -> None:
    check(DOCUMENT.read_text(encoding="utf-8"))


def test_constants_in_code() -> None:
    check_constants_in_code(_native_code(), _device_code())


# -- planted faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (check_versions, "Contract version: **2**", "Contract version: **1**"),
        (check_versions, "## 7. Attention\n\nVersion 2", "## 7. Attention\n\nVersion 1"),
        (check_versions, "## 8. Router\n\nVersion 1\n", "## 8. Router\n"),
        (check_versions, "| norms | 2 |", "| norms | 3 |"),
        (check_versions, "## 13. Modes", "## 14. Modes"),
        (check_ops, "| `k_swiglu` |", "| `k_silu` |"),
        (check_ops, "| `rope` | `k_rope` |", "| `rotary` | `k_rope` |"),
        (check_ops, "`native/attention.cpp`", "`native/norm.cpp`"),
        (check_paths, "`kernels/ucrt.cuh`", "`kernels/ucrt.h`"),
        (check_reasons, "**Why.** Contraction", "Contraction"),
        (check_constants, "h = 1469598103934665603", "h = 14695981039346656037"),
        (check_constants, "chunks of **256**", "chunks of **128**"),
        (check_constants, "`a < 0x0d800000` (every", "`a < 0x0d000000` (every"),
        (check_constants, "`a < 0x0d800000`\n   (all", "`a < 0x0d000000`\n   (all"),
        (check_constants, "`j = t mod 32`", "`j = t mod 16`"),
        (check_constants, "`l = j mod 32`", "`l = j mod 8`"),
        (check_constants, "`l = k mod 32`", "`l = k mod 8`"),
        (check_constants, "32767)`", "32768)`"),
        (check_fields, "| `kraw` | f32", "| `kraw`+ | f32"),
        (check_fields, "| `ks` | f32 `[nkv]` |", "| `ks` | f32 `[nkv, hd]` |"),
        (check_fields, "| `vs` | f32", "| `vs` | i8"),
    ],
)
def test_check_notices(check: Callable[[str], None], old: str, new: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(AssertionError):
        check(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1099511628211ull", "1099511628217ull"),
        ("kAttentionChunk = 256;", "kAttentionChunk = 512;"),
        ("kSumLanes = 32;", "kSumLanes = 16;"),
        ("#define CHUNK 256", "#define CHUNK 128"),
    ],
)
def test_code_check_notices(old: str, new: str) -> None:
    assert old in _native_code() + _device_code()
    with pytest.raises(AssertionError):
        check_constants_in_code(_native_code().replace(old, new), _device_code().replace(old, new))
