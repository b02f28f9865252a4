"""A NaN or infinity anywhere is an error that names position, layer and operation (never endless token 0)."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from kestrel.cpu import CpuBackend
from kestrel.engine import Engine
from kestrel.errors import NonFiniteError
from kestrel.ops import WType
from kestrel.sampling import SamplingParams
from kestrel.weights import QuantTensor, Weights
from tests.support.models import random_weights, tiny_config

PROMPT = [5, 300, 17, 42, 9]
PARAMS = SamplingParams(max_tokens=8)
F16 = {"nan": 0x7E00, "inf": 0x7C00, "-inf": 0xFC00}


def damaged(weights: Weights, name: str, row: int, value: str, expert: int | None = None) -> Weights:
    """``weights`` with one value of one row replaced: a scale, a bf16 weight, or an element of a norm."""
    tensor = weights[name]
    changed: QuantTensor | np.ndarray
    if not isinstance(tensor, QuantTensor):
        changed = tensor.copy()
        changed[row] = float(value)
    elif tensor.scale is None:
        codes = tensor.codes.copy()
        codes[row, 0] = np.array(float(value), ml_dtypes.bfloat16).view(np.uint16)
        changed = replace(tensor, codes=codes)
    else:
        scale = tensor.scale.copy()
        scale[(row, 0) if expert is None else (expert, row, 0)] = F16[value]
        changed = replace(tensor, scale=scale)
    return {**weights, name: changed}


def engine(weights: Weights, family: str = "qwen3", **options: int) -> Engine:
    config = tiny_config(family, layers=3)
    return Engine(config, weights, CpuBackend(1), context=64, **options)


def tiny_weights(family: str = "qwen3") -> Weights:
    return random_weights(tiny_config(family, layers=3), WType.q4local)


CASES = [
    (f"layers.{layer}.{tensor}", layer, op, label)
    for layer in (0, 1, 2)
    for tensor, op, label in [
        ("attn_norm", "rms_norm", "attn_norm"),
        ("v", "matmul", "qkv"),
        ("k_norm", "qk_norm", "k_norm"),
        ("o", "matmul", "o"),
        ("up", "matmul", "gate_up"),
        ("down", "matmul", "down"),
    ]
] + [("norm", None, "rms_norm", "norm"), ("head", None, "matmul", "head")]


@pytest.mark.parametrize(("name", "layer", "op", "label"), CASES)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_the_operation_is_named(name: str, layer: int | None, op: str, label: str, value: str) -> None:
    weights = damaged(tiny_weights(), name, 7, value)
    for chunk in (1, 256):
        with pytest.raises(NonFiniteError) as caught:
            list(engine(weights, chunk=chunk).generate(PROMPT, PARAMS))
        error = caught.value
        # Only the last position's final norm and logits are computed.
        assert error.position == (0 if layer is not None else len(PROMPT) - 1)
        assert (error.layer, error.op) == (layer, op)
        full = label if layer is None else f"l{layer}.{label}"
        assert f"({full}, contract section" in str(error)
        assert "element 7 " in str(error) or label in ("gate_up", "qkv")


@pytest.mark.parametrize("sampling", [PARAMS, SamplingParams(max_tokens=8, temperature=1.0)])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_position_of_a_damaged_embedding_row(sampling: SamplingParams, place: int) -> None:
    weights = damaged(tiny_weights(), "embed", PROMPT[place], "inf")
    for chunk in (1, 2, 256):
        run = engine(weights, chunk=chunk)
        with pytest.raises(NonFiniteError) as caught:
            list(run.generate(PROMPT, sampling))
        assert (caught.value.position, caught.value.layer, caught.value.op) == (place, None, "embed")
        # Rows of the failed request are gone: a request without the token works, reuse or not.
        others = [t for t in PROMPT if t != PROMPT[place]]
        expected = list(engine(tiny_weights()).generate(others, sampling))
        if PROMPT[place] not in expected:
            assert list(run.generate(others, sampling, reuse=True)) == expected


def test_a_damaged_expert_is_found_where_it_is_first_chosen() -> None:
    weights = tiny_weights("qwen3_moe")
    healthy = engine(weights, "qwen3_moe")
    chosen = [healthy.tensor(PROMPT, len(PROMPT), t, 1, "rids")[0].tolist() for t in range(len(PROMPT))]
    expert = min({e for ids in chosen[1:] for e in ids} - set(chosen[0]))
    first = next(t for t, ids in enumerate(chosen) if expert in ids)
    run = engine(damaged(weights, "layers.1.experts.down", 3, "nan", expert), "qwen3_moe")
    with pytest.raises(NonFiniteError) as caught:
        list(run.generate(PROMPT, PARAMS))
    assert (caught.value.position, caught.value.layer, caught.value.op) == (first, 1, "moe_matmul")
    assert "l1.experts.down" in str(caught.value)


def test_positions_come_before_layers() -> None:
    """With two faults the lower position is named, though a whole chunk meets the other operation first."""
    weights = tiny_weights("qwen3_moe")
    healthy = engine(weights, "qwen3_moe")
    chosen = [healthy.tensor(PROMPT, len(PROMPT), t, 2, "rids")[0].tolist() for t in (1, 0)]
    expert = min(set(chosen[0]) - set(chosen[1]))
    both = damaged(weights, "layers.2.experts.up", 3, "nan", expert)
    both = damaged(both, "embed", PROMPT[4], "nan")
    for chunk in (1, 256):
        with pytest.raises(NonFiniteError) as caught:
            list(engine(both, "qwen3_moe", chunk=chunk).generate(PROMPT, PARAMS))
        assert (caught.value.position, caught.value.layer, caught.value.op) == (1, 2, "moe_matmul")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_damaged_router_is_found(value: str) -> None:
    """Also where the logit would only keep its expert from being chosen."""
    run = engine(damaged(tiny_weights("qwen3_moe"), "layers.2.router", 4, value), "qwen3_moe")
    with pytest.raises(NonFiniteError) as caught:
        list(run.generate(PROMPT, PARAMS))
    assert (caught.value.position, caught.value.layer, caught.value.op) == (0, 2, "matmul")
    assert "l2.router" in str(caught.value)


def test_a_token_of_the_answer_is_named_by_its_position() -> None:
    tokens = list(engine(tiny_weights()).generate(PROMPT, PARAMS))
    third = tokens[2]
    assert third not in [*PROMPT, *tokens[:2]]
    run = engine(damaged(tiny_weights(), "embed", third, "nan"))
    got = []
    with pytest.raises(NonFiniteError) as caught:
        got.extend(run.generate(PROMPT, PARAMS))
    assert (caught.value.position, caught.value.op) == (len(PROMPT) + 2, "embed")


def test_logits_name_the_first_bad_row() -> None:
    run = engine(damaged(tiny_weights(), "embed", 42, "nan"))
    with pytest.raises(NonFiniteError, match="after position 3 are not finite: first at position 3"):
        run.logits(PROMPT)
