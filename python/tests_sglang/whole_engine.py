# SPDX-License-Identifier: Apache-2.0
"""Generates with SGLang's engine, whose scheduler and detokeniser are processes of their own.

python3 whole_engine.py MODEL_FOLDER tokens.json < prompts.json

The engine's processes may write to stdout, too.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    import sglang

    engine = sglang.Engine(
        model_path=sys.argv[1],
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        context_length=216,
        max_total_tokens=416,
        chunked_prefill_size=48,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.5,
        log_level="info",
    )
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    outputs = engine.generate(input_ids=json.load(sys.stdin), sampling_params=sampling)
    Path(sys.argv[2]).write_text(json.dumps([output["output_ids"] for output in outputs]), encoding="utf-8")
    engine.shutdown()
