"""Every lint rule is seen red: the fault is planted in source and compiled, or in PTX itself."""

from __future__ import annotations

import re

import pytest

from kestrel.cuda import compile as nvrtc
from kestrel.cuda.ptx_lint import CORRECTED, early_findings, entry_points, functions, lint
from kestrel.cuda.sources import kernel_sources

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")

CLEAN = """
extern "C" __global__ void k_norm(const float *x, float *y, double *z) {
    const int i = threadIdx.x;
    y[i] = 1.0f / sqrtf(x[i] * x[i] + x[i + 1]);
    z[i] = z[i] / 3.0 + z[i + 1] * z[i + 2];
    atomicAdd((int *)y, 1);
}
"""


def ptx(text: str, flags: list[str] | None = None, monkeypatch: pytest.MonkeyPatch | None = None) -> str:
    if flags is not None:
        assert monkeypatch is not None
        monkeypatch.setattr(nvrtc, "EXACT_FLAGS", tuple(flags))
    return nvrtc.compile_source("planted.cu", text.encode(), {}, "sm_80").ptx


def rules(text: str, *fma: str) -> set[str]:
    return {finding.rule for finding in lint(text, {"k_norm": fma})}


def test_clean_kernel_has_no_findings() -> None:
    assert rules(ptx(CLEAN)) == set()


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--ftz=true", "flush-to-zero"),
        ("--prec-div=false", "approximation"),
        ("--prec-sqrt=false", "approximation"),
        ("--fmad=true", "undeclared fma"),
    ],
)
def test_each_flag_is_needed(flag: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = flag.split("=")[0]
    flags = [flag if f.startswith(name) else f for f in nvrtc.EXACT_FLAGS]
    assert flags != list(nvrtc.EXACT_FLAGS)
    assert rule in rules(ptx(CLEAN, flags, monkeypatch))


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("y[0] = __expf(x[0]);", "approximation"),
        ("y[0] = rsqrtf(x[0]);", "approximation"),
        ("y[0] = __fdividef(x[0], x[1]);", "approximation"),
        ("y[0] = __fmaf_rn(x[0], x[1], x[2]);", "undeclared fma"),
        ("z[0] = __fma_rn(z[0], z[1], z[2]);", "undeclared fma"),
        ("atomicAdd(y, x[0]);", "float atomic"),
        ("atomicAdd(z, z[1]);", "float atomic"),
        ('asm("add.f32 %0, %1, %2;" : "=f"(y[0]) : "f"(x[0]), "f"(x[1]));', "contractible operation"),
        ('asm("div.full.f32 %0, %1, %2;" : "=f"(y[0]) : "f"(x[0]), "f"(x[1]));', "approximation"),
        (
            'asm("sqrt.rz.f32 %0, %1;" : "=f"(y[0]) : "f"(x[0]));',
            "division or root not correctly rounded",
        ),
    ],
)
def test_planted_statement(statement: str, rule: str) -> None:
    source = f'extern "C" __global__ void k_norm(const float *x, float *y, double *z) {{ {statement} }}'
    assert rules(ptx(source)) == {rule}


def test_planted_float_matrix_instruction() -> None:
    line = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f2};"
    text = f".visible .entry k_norm(\n)\n{{\n\t{line}\n\tret;\n}}\n"
    assert rules(text) == {"float matrix instruction"}


def test_integer_matrix_instruction_passes() -> None:
    line = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r4};"
    assert rules(f".visible .entry k_norm(\n)\n{{\n\t{line}\n}}\n") == set()


def test_declared_fma_passes_for_its_type_alone() -> None:
    source = """
    extern "C" __global__ void k_norm(const float *x, float *y, double *z) {
        y[0] = __fmaf_rn(x[0], x[1], x[2]);
        z[0] = __fma_rn(z[0], z[1], z[2]);
    }"""
    assert rules(ptx(source), "f32", "f64") == set()
    assert rules(ptx(source), "f32") == {"undeclared fma"}


def test_unknown_kernel_is_refused() -> None:
    findings = lint(ptx(CLEAN), {})
    assert [f.rule for f in findings] == ["kernel without an entry in DECLARED_FMA"]


def test_fast_kernels_are_not_looked_at() -> None:
    source = 'extern "C" __global__ void k_norm_fast(float *y) { y[0] = __expf(y[1]); }'
    assert lint(ptx(source), {}) == []


def test_device_functions_that_are_not_inlined_are_looked_at() -> None:
    source = """
    __device__ __noinline__ float helper(float x, int n) { return n ? __expf(x) : x; }
    extern "C" __global__ void k_norm(float *y) { y[0] = helper(y[1], threadIdx.x); }
    """
    text = ptx(source)
    assert len(functions(text)) == 2
    assert entry_points(text) == ["k_norm"]
    assert "approximation" in rules(text)


def test_predicated_instructions_are_looked_at() -> None:
    text = ".visible .entry k_norm(\n)\n{\n\t@%p1 ex2.approx.ftz.f32 %f1, %f2;\n}\n"
    assert rules(text) == {"approximation", "flush-to-zero"}


def in_braces(*lines: str) -> str:
    body = "\n".join(["{", *lines, "}"])
    return f".visible .entry k_norm(\n)\n{{\n{body}\n}}\n"


@pytest.mark.parametrize("block", CORRECTED)
def test_an_approximation_must_be_corrected(block: tuple[str, ...]) -> None:
    block = tuple(re.sub(r"\bin\b", "%f1", re.sub(r"\bout\b", "%f2", line)) for line in block)
    assert rules(in_braces(*block), "f32") == set()
    for at, line in enumerate(block[1:], 1):
        refused = {"approximation", "flush-to-zero"} if at > 1 else {"approximation"}
        if at > 1:  # a step left out
            assert rules(in_braces(*block[:at], *block[at + 1 :]), "f32") == refused
        for register in set(re.findall(r"near|rest|half|guess|%f[12]", line)):  # a step of other numbers
            changed = (*block[:at], line.replace(register, "%f3"), *block[at + 1 :])
            result = at == len(block) - 1 and register == "%f2"  # which may be any
            assert result or refused <= rules(in_braces(*changed), "f32"), changed
    assert "approximation" in rules(in_braces(*block, "mov.f32 %f3, near;"), "f32")
    assert "approximation" in rules(in_braces("mov.f32 %f3, 0f00000000;", *block), "f32")


def test_the_corrections_are_those_of_the_kernels() -> None:
    text = b"""
    #include "port.cuh"
    extern "C" __global__ void k_norm(float *x) { x[0] = reciprocal(x[0]) + root(x[1]); }
    """
    compiled = nvrtc.compile_source("corrected.cu", text, kernel_sources().headers, "sm_90").ptx
    assert "rcp.approx" in compiled
    assert "rsqrt.approx" in compiled
    assert rules(compiled, "f32") == set()


EARLY = """
extern "C" __global__ void k_norm(const float *w, float *x) {{
    {first}
    asm volatile("griddepcontrol.wait;" ::: "memory");
    x[1] = x[0] + w[2];
}}
"""


@pytest.mark.parametrize(
    ("first", "rule"),
    [
        ("x[2] = __ldg(w);", "access ahead of griddepcontrol.wait"),
        ("if (x[3] > 0) return;", "access ahead of griddepcontrol.wait"),
        ("atomicAdd((int *)x, 1);", "access ahead of griddepcontrol.wait"),
        ('asm volatile("griddepcontrol.launch_dependents;");', "next kernel begun ahead of the wait"),
        ("float a = __ldg(w); if (a == 3.0f) __nanosleep(1);", None),
        ("float a = __ldcg(x); if (a == 3.0f) __nanosleep(1);", "access ahead of griddepcontrol.wait"),
        (
            'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(0), "l"(x) : "memory");',
            "access ahead of griddepcontrol.wait",
        ),
    ],
)
def test_access_ahead_of_the_wait(first: str, rule: str | None) -> None:
    text = nvrtc.compile_source("early.cu", EARLY.format(first=first).encode(), {}, "sm_90").ptx
    assert {f.rule for f in early_findings(text, {"k_norm"})} == ({rule} if rule else set())
    assert early_findings(text, set()) == []
    allowed = rule == "next kernel begun ahead of the wait"
    assert (early_findings(text, {"k_norm"}, {"k_norm"}) == []) == (allowed or rule is None)
    past_l1 = "__ldcg" in first or "cp.async" in first
    assert (early_findings(text, {"k_norm"}, (), {"k_norm"}) == []) == (past_l1 or rule is None)


def test_a_function_that_waits() -> None:
    part = """
    static __device__ __noinline__ void part(float *x) {{
        {first}
        asm volatile("griddepcontrol.wait;" ::: "memory");
        x[1] = x[0];
    }}
    extern "C" __global__ void k_norm(float *x) {{ part(x); }}
    """
    for first, rules in (("", set()), ("x[2] = 1.0f;", {"access ahead of griddepcontrol.wait"})):
        text = nvrtc.compile_source("part.cu", part.format(first=first).encode(), {}, "sm_90").ptx
        assert {f.rule for f in early_findings(text, {"k_norm"})} == rules


def test_early_kernel_without_a_wait() -> None:
    text = nvrtc.compile_source("planted.cu", CLEAN.encode(), {}, "sm_90").ptx
    assert "launched early without griddepcontrol.wait" in {f.rule for f in early_findings(text, {"k_norm"})}


CLUSTER = """
#include "port.cuh"
struct Args {{ float4 *out; }};
KERNEL void k_norm(const Args a) {{
    DYNAMIC_SHARED(shared);
    float *const f = (float *)shared;
    cluster_sync();
    const int next = (cluster_rank() + 1) % cluster_size();
    cluster_store(f, next, 1.0f);
    cluster_store((int *)f + 1, next, 1);
    cluster_arrive();
    {ahead}
    cluster_wait();
    wait_for_previous();
    a.out[threadIdx.x] = ((float4 *)f)[0];
    cluster_sync();
}}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_clusters_pass(arch: str) -> None:
    headers = kernel_sources().headers
    text = nvrtc.compile_source("planted.cu", CLUSTER.format(ahead="").encode(), headers, arch).ptx
    assert rules(text) == set()
    expected = {
        "barrier.cluster.arrive.release.aligned": 3,
        "barrier.cluster.wait.acquire.aligned": 3,
        "st.shared::cluster.u32": 2,
    }
    found = {instruction: text.count(instruction) for instruction in expected}
    if arch == "sm_80":
        assert set(found.values()) == {0}
        assert "bar.sync" in text
        assert "cluster" not in text
        return
    assert found == expected
    # Shared memory of the cluster is of this launch: it may be used ahead of the wait, other memory may not.
    assert early_findings(text, {"k_norm"}) == []
    store = CLUSTER.format(ahead="a.out[0].x = 1.0f;").encode()
    text = nvrtc.compile_source("planted.cu", store, headers, arch).ptx
    assert {f.rule for f in early_findings(text, {"k_norm"})} == {"access ahead of griddepcontrol.wait"}


SENDS = """
#include "port.cuh"
struct Args { float4 *out; };
KERNEL void k_norm(const Args a) {
    DYNAMIC_SHARED(shared);
    __shared__ unsigned long long gate;
    float4 *const f = (float4 *)shared;
    if (warp_id() == 0) cluster_open(&gate);
    cluster_begin();
    if (warp_id() == 0) cluster_expect(&gate, 24);
    cluster_wait();
    const int next = (cluster_rank() + 1) % cluster_size();
    if (threadIdx.x == 0) {
        cluster_send((float *)f, next, 1.0f, &gate);
        cluster_send((int *)f + 1, next, 1, &gate);
        cluster_send(f + 1, next, make_float4(1.0f, 2.0f, 3.0f, 4.0f), &gate);
    }
    cluster_receive(&gate, 0);
    wait_for_previous();
    a.out[threadIdx.x] = f[0];
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_sends_of_a_cluster_pass(arch: str) -> None:
    text = nvrtc.compile_source("planted.cu", SENDS.encode(), kernel_sources().headers, arch).ptx
    assert rules(text) == set()
    if arch == "sm_80":
        assert "bar.sync" in text
        assert not any(word in text for word in ("cluster", "mbarrier", "async"))
        return
    send = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    expected = {
        "mbarrier.init.shared::cta.b64": 1,
        "fence.mbarrier_init.release.cluster": 1,
        "barrier.cluster.arrive.relaxed.aligned": 1,
        "barrier.cluster.wait.acquire.aligned": 1,
        "mbarrier.arrive.expect_tx.shared::cta.b64": 1,
        f"{send}.b32": 2,
        f"{send}.v4.b32": 1,
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64": 1,
        # The plain forms, of a launch without clusters, where there is no st.async.
        "bar.sync": 1,
        "barrier.cluster.arrive.release": 0,
        "fence.acq_rel": 0,
    }
    assert {instruction: text.count(instruction) for instruction in expected} == expected
    # Like stores to shared memory of the cluster: of this launch.
    assert early_findings(text, {"k_norm"}) == []
