"""Runs llama.cpp for bench/cpu.py, in an environment of its own: JSON requests and answers, one a line.

Requests: ``{"do": "run", "prompt": ids, "generated": ids}`` -> ``{"prompt_seconds", "generation_seconds"}``
(the prompt as one batch, then the generated ids one by one) and ``{"do": "logits", "prompt": ids}`` ->
``{"logits"}`` after the last.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp


class Llama:
    def __init__(self, model: str, threads: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = context
        params.n_ubatch = 512
        params.n_threads = threads
        params.n_threads_batch = threads
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp could not make a context")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _decode(self, ids: list[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status}")
        # Waits for the result, as a sampler would.
        self._logits = llama_cpp.llama_get_logits_ith(self._context, -1)

    def run(self, prompt: list[int], generated: list[int]) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        began = time.perf_counter()
        self._decode(prompt)
        middle = time.perf_counter()
        for token in generated:
            self._decode([token])
        end = time.perf_counter()
        return {"prompt_seconds": middle - began, "generation_seconds": end - middle}

    def logits(self, prompt: list[int]) -> dict[str, Any]:
        self.run(prompt, [])
        return {"logits": self._logits[: self._vocab_size]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    args = parser.parse_args()
    llama = Llama(args.model, args.threads, args.context)
    info = llama_cpp.llama_print_system_info().decode()
    print(json.dumps({"version": llama_cpp.__version__, "system": info}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        print(json.dumps(getattr(llama, do)(**request)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
