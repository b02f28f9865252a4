"""What the PTX of an exact kernel may not contain.

PTX, not machine code, is the place to look: the assembler expands a correctly rounded division or square root
into approximations plus corrections, so there an approximation proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kestrel.launch import (
    ATTENTION_CLUSTERS,
    ATTENTION_STAGES,
    EXPERT_STAGES,
    GATE_UP_STAGES,
    HEAD_FORMS,
    MATMUL_ADD_FORMS,
    NORM_MATMUL_FORMS,
    READS_BEFORE_STEP,
    READS_TWO_BEFORE,
    STARTS_NEXT_FIRST,
)

# Kernel -> the float types whose fma its source writes. A kernel that is not listed may not be used: whoever
# adds one declares it here. "f64" are the UCRT functions (contract section 11), "f32" the fmas of
# sections 3, 7 and 9, and the last steps of quotients.
DECLARED_FMA: Mapping[str, frozenset[str]] = {
    "k_embed": frozenset(),
    "k_rms_norm_cpu": frozenset({"f32"}),
    "k_quantize_a8": frozenset({"f32"}),
    "k_matmul": frozenset({"f32"}),
    "k_matmul_m2": frozenset({"f32"}),
    "k_matmul_m4": frozenset({"f32"}),
    "k_matmul_m8": frozenset({"f32"}),
    "k_matmul_tiled": frozenset({"f32"}),
    "k_moe_matmul_tiled": frozenset({"f32"}),
    "k_qk_norm_cpu": frozenset(),
    "k_rope": frozenset({"f64"}),
    "k_kv_append": frozenset(),
    "k_attn_decode_online": frozenset({"f32", "f64"}),
    "k_add": frozenset(),
    "k_swiglu": frozenset({"f64"}),
    "k_router_topk": frozenset({"f64"}),
    "k_moe_matmul": frozenset({"f32"}),
    "k_moe_combine": frozenset({"f32"}),
    "k_argmax": frozenset(),
    "k_feedback": frozenset(),
    "k_l2_hash": frozenset(),
    "k_l2_hash_many": frozenset(),
    "k_l2_hash_long": frozenset(),
    "k_norm_a8": frozenset({"f32"}),
    **{f"k_norm_matmul_{suffix}": frozenset({"f32"}) for suffix in NORM_MATMUL_FORMS},
    **{f"k_matmul_add_{suffix}": frozenset({"f32"}) for suffix in MATMUL_ADD_FORMS},
    **{f"k_head_{suffix}": frozenset({"f32"}) for suffix in HEAD_FORMS},
    "k_norm_router": frozenset({"f32"}),
    **{name: frozenset({"f32", "f64"}) for name in GATE_UP_STAGES},
    **{name: frozenset({"f32", "f64"}) for name in EXPERT_STAGES},
    **{name: frozenset({"f32", "f64"}) for name in (*ATTENTION_STAGES, *ATTENTION_CLUSTERS)},
    "k_attn_merge": frozenset({"f32", "f64"}),
}

# Approximations that the instructions behind them correct to what a division and a root round to: the
# inline assembly of ``reciprocal`` and ``root`` in kernels/port.cuh, to the letter. ``in`` and ``out`` are
# registers.
CORRECTED = (
    (
        ".reg .f32 near, rest;",
        "rcp.approx.ftz.f32 near, in;",
        "fma.rn.f32 rest, in, near, 0fBF800000;",
        "neg.f32 rest, rest;",
        "fma.rn.f32 out, near, rest, near;",
    ),
    (
        ".reg .f32 near, half, guess, rest;",
        "rsqrt.approx.ftz.f32 near, in;",
        "mul.rn.f32 guess, in, near;",
        "mul.rn.f32 half, near, 0f3F000000;",
        "neg.f32 rest, guess;",
        "fma.rn.f32 rest, rest, guess, in;",
        "fma.rn.f32 out, rest, half, guess;",
    ),
)

_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w]*(?:\.[\w:]+)*)(?=[\s;])")
_FLOAT = re.compile(r"\.(f16|f16x2|bf16|bf16x2|f32|f32x2|f64|tf32|e4m3|e5m2)\b")
_ALWAYS_APPROXIMATE = ("ex2", "lg2", "sin", "cos", "tanh")
_ROUNDED = ("add", "sub", "mul")


@dataclass(frozen=True)
class Finding:
    """One forbidden instruction."""

    kernel: str
    rule: str
    line: int  # of the PTX
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.rule}: PTX line {self.line}: {self.text}"


def functions(ptx: str) -> dict[str, list[tuple[int, str]]]:
    """Entry points and device functions, each with its numbered body lines."""
    found: dict[str, list[tuple[int, str]]] = {}
    name: str | None = None
    depth = 0
    for number, line in enumerate(ptx.splitlines(), 1):
        code = line.split("//", 1)[0]
        opened, closed = code.count("{"), code.count("}")
        if depth == 0:
            match = _FUNCTION.search(code)
            if match:
                name = match.group(1)
            if opened == 0:
                if code.strip().endswith(";"):  # a declaration, or a variable
                    name = None
                continue
        if name is not None:
            found.setdefault(name, []).append((number, code))
        depth += opened - closed
        if depth == 0:
            name = None
    return found


def entry_points(ptx: str) -> list[str]:
    """Names of the kernels in a PTX text."""
    return re.findall(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)", ptx, re.MULTILINE)


def instruction_findings(kernel: str, number: int, code: str, fma: Collection[str]) -> Iterable[Finding]:
    """The rules, on one line of PTX."""
    match = _INSTRUCTION.match(code)
    if match is None:
        return
    opcode = match.group(1)
    base, *modifiers = opcode.split(".")
    floats = _FLOAT.findall(opcode)
    text = code.strip()
    if "ftz" in modifiers:
        yield Finding(kernel, "flush-to-zero", number, text)
    if {"approx", "full"} & set(modifiers) or (base in _ALWAYS_APPROXIMATE and floats):
        yield Finding(kernel, "approximation", number, text)
    if base in ("fma", "mad") and floats and not set(floats) <= set(fma):
        yield Finding(kernel, "undeclared fma", number, text)
    if base in _ROUNDED and floats and not {"rn", "rz", "rm", "rp"} & set(modifiers):
        # Without a rounding modifier the assembler may fuse a multiplication and an addition.
        yield Finding(kernel, "contractible operation", number, text)
    if base in ("div", "sqrt", "rcp") and floats and not {"rn", "approx", "full"} & set(modifiers):
        yield Finding(kernel, "division or root not correctly rounded", number, text)
    if base in ("atom", "red") and floats:
        yield Finding(kernel, "float atomic", number, text)
    if base in ("mma", "wmma", "wgmma", "tcgen05") and floats:
        yield Finding(kernel, "float matrix instruction", number, text)


def early_findings(
    ptx: str,
    programmatic: Collection[str],
    first: Collection[str] = STARTS_NEXT_FIRST,
    readers: Collection[str] = READS_TWO_BEFORE | READS_BEFORE_STEP,
) -> list[Finding]:
    """Kernels launched before the one ahead has ended: none may lack the wait, or reach past it.

    Ahead of ``griddepcontrol.wait`` a kernel may read weights, by loads that are marked read-only
    (``ld.global.nc``), and ``readers`` what other kernels wrote, past L1 (``ld.global.cg``, ``cp.async.cg``);
    it may write nothing, and not let the next kernel begin, but for ``first``. Only for sm_90 and newer.
    Where a kernel waits at several places, what lies between them is not looked at.
    """
    bodies = functions(ptx)
    waiting = {name for name, body in bodies.items() if any("griddepcontrol.wait" in c for _, c in body)}

    def walk(name: str, body: list[tuple[int, str]]) -> list[Finding]:
        """Of the lines up to the wait, or up to the first call of a function that waits."""
        findings: list[Finding] = []
        allowed = {"nc", "cg"} if name.removesuffix("_fast") in readers else {"nc"}
        for number, code in body:
            match = _INSTRUCTION.match(code)
            opcode = match.group(1) if match else ""
            if opcode.startswith("griddepcontrol.wait") or code.strip().rstrip(",") in waiting:
                return findings
            begins = opcode.startswith("griddepcontrol.launch_dependents")
            if begins and name.removesuffix("_fast") not in first:
                findings.append(Finding(name, "next kernel begun ahead of the wait", number, code.strip()))
            base, *modifiers = opcode.split(".")
            # Shared memory of another block of the cluster (shared::cluster) is of this launch, too.
            spaces = {modifier.split("::")[0] for modifier in modifiers}
            own = {"param", "shared", "const", "local"} & spaces
            memory = base in ("ld", "st", "atom", "red") and not own
            copies = base == "cp" and modifiers[:1] == ["async"] and "cg" in modifiers
            if (copies and "cg" not in allowed) or (
                memory and not (base == "ld" and allowed & set(modifiers))
            ):
                findings.append(Finding(name, "access ahead of griddepcontrol.wait", number, code.strip()))
        findings.append(Finding(name, "launched early without griddepcontrol.wait", body[0][0], name))
        return findings

    findings: list[Finding] = []
    for name, body in bodies.items():
        if name.removesuffix("_fast") in programmatic:
            called = {code.strip().rstrip(",") for _, code in body} & waiting
            for part in (name, *sorted(called)):
                findings += [Finding(name, f.rule, f.line, f.text) for f in walk(part, bodies[part])]
    return findings


def lint(ptx: str, declared: Mapping[str, Collection[str]] | None = None) -> list[Finding]:
    """Every forbidden instruction of the exact kernels in ``ptx``; ``*_fast`` kernels are not looked at.

    Device functions that were not inlined obey the rules too; their fma is what any kernel of the text
    declares.
    """
    table = DECLARED_FMA if declared is None else declared
    entries = entry_points(ptx)
    anywhere = {kind for name in entries for kind in table.get(name, ())}
    findings: list[Finding] = []
    for name, body in functions(ptx).items():
        if name.endswith("_fast"):
            continue
        if name in entries and name not in table:
            findings.append(Finding(name, "kernel without an entry in DECLARED_FMA", body[0][0], name))
        fma = table.get(name, ()) if name in entries else anywhere
        corrected = _corrected(body)
        for at, (number, code) in enumerate(body):
            if at not in corrected:
                findings += instruction_findings(name, number, code, fma)
    return findings


def _corrected(body: list[tuple[int, str]]) -> set[int]:
    """The places of the approximations in ``body`` that begin one of ``CORRECTED``, in braces."""
    lines = [" ".join(code.split()) for _, code in body]
    places: set[int] = set()
    for at, line in enumerate(lines):
        source = re.fullmatch(r"\w+\.approx\.ftz\.f32 near, (%\w+);", line)
        if source is None:
            continue
        for block in CORRECTED:
            end = at + len(block)  # behind the closing brace
            result = re.fullmatch(r"fma\.rn\.f32 (%\w+), .*", lines[end - 2]) if end <= len(lines) else None
            if result is not None:
                wanted = [re.sub(r"\bin\b", source.group(1), text) for text in block]
                wanted = [re.sub(r"\bout\b", result.group(1), text) for text in wanted]
                if lines[at - 2 : end] == ["{", *wanted, "}"]:
                    places.add(at)
    return places
