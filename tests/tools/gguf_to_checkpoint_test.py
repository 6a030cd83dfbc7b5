#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of testdata becomes a GGUF file as llama.cpp writes them, and the conversion makes the
same checkpoint of it again. Skipped (exit code 77) where the Python package gguf is missing.

usage: gguf_to_checkpoint_test.py SOURCE_FOLDER FOVEA
"""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import gguf
    import numpy
except ImportError:
    # `make demo` keeps a Python that has it.
    kept = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/fovea/gguf/bin/python"
    if os.path.exists(kept) and "FOVEA_GGUF_PYTHON" not in os.environ:
        os.execve(kept, [kept, *sys.argv], os.environ | {"FOVEA_GGUF_PYTHON": kept})
    print("skipped: the Python package gguf is missing; `make demo` installs it")
    sys.exit(77)

SOURCE, FOVEA = pathlib.Path(sys.argv[1]), sys.argv[2]
MODEL = SOURCE / "testdata/models/llama"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def read_safetensors(path):
    """Name -> the bits of its bf16 values."""
    bytes = path.read_bytes()
    (length,) = struct.unpack("<Q", bytes[:8])
    header = json.loads(bytes[8:8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", name
        begin, end = entry["data_offsets"]
        values = numpy.frombuffer(bytes[8 + length + begin:8 + length + end], dtype=numpy.uint16)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def to_f32(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def gguf_name(name):
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
                         ("model.layers.", "blk."), ("input_layernorm", "attn_norm"),
                         ("post_attention_layernorm", "ffn_norm"), ("self_attn.o_proj", "attn_output"),
                         ("self_attn.", "attn_"), ("mlp.", "ffn_"), ("_proj", "")):
        name = name.replace(ours, theirs)
    return name


def join_pairs(rows, heads):
    """Rows of q or k in the order of GGUF: dimension i of a head, then dimension i + half of it."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + i + part * half
             for head in range(heads) for i in range(half) for part in range(2)]
    return rows[order]


class Conversion(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        self.config = json.loads((MODEL / "config.json").read_text())
        self.tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
        self.tensors = read_safetensors(MODEL / "model.safetensors")

    def tearDown(self):
        self.folder.cleanup()

    def write_gguf(self, kind=gguf.GGMLQuantizationType.F32, architecture="llama", pre="gpt-2",
                   change=lambda writer: None):
        config, path = self.config, str(self.path / "model.gguf")
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        model = self.tokenizer["model"]
        special = {token["id"] for token in self.tokenizer["added_tokens"]}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
        writer.add_token_types([3 if i in special else 1 for i in range(config["vocab_size"])])
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(config["bos_token_id"])
        writer.add_eos_token_id(config["eos_token_id"])
        writer.add_chat_template(TEMPLATE)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for name, bits in self.tensors.items():
            values = to_f32(bits)
            part = name.split(".")[-2]
            if part in heads:
                values = join_pairs(values, heads[part])
            if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(gguf_name(name), values)
            else:
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def convert(self, path):
        out = self.path / "checkpoint"
        result = subprocess.run([sys.executable, SOURCE / "tools/gguf_to_checkpoint.py", path, out],
                                capture_output=True, text=True)
        return out, result

    def converted(self, **options):
        out, result = self.convert(self.write_gguf(**options))
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        return out

    def test_the_same_checkpoint_comes_back(self):
        out = self.converted()
        tensors = read_safetensors(out / "model.safetensors")
        self.assertEqual(tensors.keys(), self.tensors.keys())
        for name, bits in self.tensors.items():
            self.assertTrue(numpy.array_equal(tensors[name], bits), name)
        config = json.loads((out / "config.json").read_text())
        for key in ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "vocab_size",
                    "rms_norm_eps", "hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id"):
            self.assertEqual(config[key], self.config[key], key)
        self.assertEqual(config["rope_theta"], self.config["rope_parameters"]["rope_theta"])
        tokenizer = json.loads((out / "tokenizer.json").read_text())
        for key in ("added_tokens", "normalizer", "pre_tokenizer", "decoder"):
            self.assertEqual(tokenizer[key], self.tokenizer[key], key)
        for key in ("vocab", "merges"):
            self.assertEqual(tokenizer["model"][key], self.tokenizer["model"][key], key)
        tokenizer_config = json.loads((out / "tokenizer_config.json").read_text())
        self.assertEqual(tokenizer_config["chat_template"], TEMPLATE)
        self.assertEqual(tokenizer_config["eos_token"], "<|eos|>")

    def test_digits_stand_alone_for_smollm(self):
        tokenizer = json.loads((self.converted(pre="smollm") / "tokenizer.json").read_text())
        self.assertEqual(tokenizer["pre_tokenizer"], {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                  self.tokenizer["pre_tokenizer"]]})

    def test_both_generate_the_same(self):
        def generate(folder):
            return subprocess.run([FOVEA, "generate", folder, "-p", "And God said", "-n", "16", "--json"],
                                  check=True, capture_output=True, text=True).stdout

        self.assertEqual(generate(self.converted()), generate(MODEL))

    def test_quantised_tensors_stay_within_their_steps(self):
        # Rows of 128 and 352 values are whole blocks of 32.
        steps = {gguf.GGMLQuantizationType.Q8_0: lambda blocks: abs(blocks).max(-1) / 127,
                 gguf.GGMLQuantizationType.Q4_1: lambda blocks: (blocks.max(-1) - blocks.min(-1)) / 15}
        for kind, step_of in steps.items():
            tensors = read_safetensors(self.converted(kind=kind) / "model.safetensors")
            for name, bits in self.tensors.items():
                want, got = to_f32(bits), to_f32(tensors[name])
                if want.ndim == 1:
                    self.assertTrue(numpy.array_equal(want, got), name)
                    continue
                steps_here = numpy.repeat(step_of(want.reshape(-1, 32)), 32).reshape(want.shape)
                # Half a step, the scales in fp16, and the result in bf16.
                allowed = steps_here * 0.52 + abs(want) * 2.0**-8
                self.assertTrue((abs(want - got) <= allowed).all(), f"{kind.name} {name}")

    def test_refuses_what_would_change_the_model(self):
        for named, options in (
                ("general.architecture is 'gemma'", {"architecture": "gemma"}),
                ("tokenizer.ggml.pre is 'qwen2', known: smollm, gpt-2", {"pre": "qwen2"}),
                ("llama.rope.scaling.type is not understood",
                 {"change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}),
                ("tokenizer.ggml.add_bos_token is true",
                 {"change": lambda w: w.add_add_bos_token(True)}),
                ("tensor blk.0.attn_q.bias is not understood",
                 {"change": lambda w: w.add_tensor("blk.0.attn_q.bias",
                                                   numpy.zeros(4, numpy.float32))})):
            with self.subTest(named):
                path = self.write_gguf(**options)
                out, result = self.convert(path)
                self.assertEqual(result.returncode, 1)
                self.assertTrue(result.stderr.startswith(f"{path}: {named}"), result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                self.assertFalse(out.exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
