"""The attention stage: ``kernels/attention_cluster.cu`` for few chunks where the GPU has clusters, else
``kernels/attention_stage.cu``; and ``kernels/attention_merge.cu`` for many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kestrel.launch import (
    ATTENTION_COUNTERS,
    ATTENTION_STAGES,
    CHUNK,
    CLUSTER_CHUNKS,
    STATIC_SHARED,
    Launch,
    MergeBy,
    Tuning,
    attention_merge_shared_bytes,
    attention_stage_shared_bytes,
    check_head_dim,
    head_groups,
    merge_by,
)
from kestrel.ops import Op
from kestrel.stages.args import AttentionClusterArgs, AttentionStageArgs
from kestrel.stages.stage import Stage, ceil, names, written

SHARE_PITCH = 36  # floats, as in kernels/attention_cluster.cu


def attention(ops: Sequence[Op], t: Tuning, position: int) -> Stage | None:
    norms = 2 if names(ops, "qk_norm", "qk_norm") else 0
    if not names(ops[norms:], "rope", "kv_append", "attention"):
        return None
    rope, kv, attn = (op.args for op in ops[norms : norms + 3])
    q, size = rope.x, 4 * attn.nh * attn.hd
    fits = rope.M == 1 and kv.M == 1 and attn.M == 1 and attn.work and attn.q == q and kv.k == q + size
    if not fits or rope.heads != attn.nh + attn.nkv or attn.kq != kv.kq:
        return None
    check_head_dim(attn.hd)
    shared = attention_stage_shared_bytes(attn.hd)
    if shared > t.shared_limit - STATIC_SHARED or attn.nh > ATTENTION_COUNTERS:  # one for a group of heads
        return None
    way = merge_by(position, t, head_groups(ops))
    merges = way not in (MergeBy.launch, MergeBy.launch_double)
    args = AttentionStageArgs(rope=rope, kv=kv, attn=attn, has_norm=int(norms == 2), merges=int(merges))
    if norms:
        q_norm, k_norm = ops[0].args, ops[1].args
        if q_norm.x != q or q_norm.heads != attn.nh or k_norm.x != kv.k or k_norm.heads != attn.nkv:
            return None
        args.q_norm, args.k_norm = q_norm, k_norm
    count = norms + 3
    if names(ops[count:], "quantize_a8"):
        a8: Any = ops[count].args
        if a8.x == attn.out and a8.M == 1 and attn.hd % 32 == 0:
            args.a8, args.has_a8 = a8, 1
            count += 1
    args.normed = attn.copies or attn.work + 4 * ATTENTION_COUNTERS
    args.roped = args.normed + 4 * (attn.nh + attn.nkv) * attn.hd
    rows = (q, q + 4 * (attn.nh + attn.nkv) * attn.hd)

    def moved(i: int, address: int) -> int | None:
        if not rows[0] <= address < rows[1]:
            return None
        return int((args.normed if i < norms else args.roped) + address - q)

    any_size, common_size, wide = ATTENTION_STAGES
    kernel = common_size if attn.hd == 128 else any_size if attn.hd < 128 else wide
    more = CHUNK * attn.hd
    args.ahead = int(t.attention_ahead and not merges and shared + more <= t.shared_limit - STATIC_SHARED)
    blocks = t.attention_blocks or t.sms * (2 if way == MergeBy.launch_double else 1)
    found = [Launch(kernel, (blocks, 1, 1), (CHUNK, 1, 1), shared + args.ahead * more, args)]
    clustered = _clustered(args, shared, t) if way == MergeBy.cluster else None
    if clustered is not None:
        found = [clustered]
    elif not merges:
        grid, threads = (ceil(attn.hd, 32), attn.nh, 1), (t.merge_threads, 1, 1)
        found.append(
            Launch("k_attn_merge", grid, threads, attention_merge_shared_bytes(t.merge_threads), args)
        )
    stored = (args.normed, args.roped + 4 * (attn.nh + attn.nkv) * attn.hd)
    # q and k stay as the matmul left them: the stage works on copies.
    return Stage(ops[:count], found, [stored, *written(ops[norms + 1 : count])], moved=moved)


def _clustered(args: Any, shared: int, t: Tuning) -> Launch | None:
    """Few chunks by clusters, whose blocks hand their states to each other."""
    attn, cluster = args.attn, min(t.attention_cluster, t.max_cluster)
    if attn.hd > 128:
        return None
    per_kv, heads = attn.nh // attn.nkv, 1
    while heads < min(t.cluster_heads, per_kv):
        heads *= 2
    behind = ceil(shared, 16) * 16
    parts = heads * ceil(attn.hd, 32)
    own = behind + 4 * SHARE_PITCH * min(t.cluster_chunks, CLUSTER_CHUNKS) * ceil(parts, cluster)
    if own > t.shared_limit - STATIC_SHARED:
        return None
    grid = (attn.nkv * ceil(per_kv, heads) * cluster, 1, 1)
    kernel = "k_attn_cluster_128" if attn.hd == 128 else "k_attn_cluster"
    return Launch(kernel, grid, (CHUNK, 1, 1), own, AttentionClusterArgs(args, heads, behind), cluster)
