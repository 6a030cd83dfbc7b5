#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file of a llama model to a checkpoint folder in the format of Hugging Face.

usage: gguf_to_checkpoint.py MODEL.gguf FOLDER

The folder gets config.json, generation_config.json, model.safetensors (bf16), tokenizer.json and
tokenizer_config.json. Quantised tensors are dequantised. The conversion stops at an unknown key or
tensor that would change the model, and names it. Needs the package gguf.
"""

import json
import os
import struct
import sys

import gguf
import numpy

# Pre-tokenizers by their name in GGUF. Both split text as GPT-2 does; the first also splits digits.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence",
               "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "gpt-2": BYTE_LEVEL,
}
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4
# Keys of the model that the conversion reads or that do not change results.
KNOWN_KEYS = {"block_count", "context_length", "embedding_length", "feed_forward_length",
              "attention.head_count", "attention.head_count_kv", "attention.key_length",
              "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
              "rope.dimension_count", "vocab_size"}
# Names of a block's tensors: in GGUF, and in a checkpoint.
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Refused(Exception):
    pass


def shortest(number):
    """Returns the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(numpy.float32(number)))


class Source:
    """Reads the keys and tensors of a GGUF file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.tensors = reader.tensors
        architecture = self.need("general.architecture")
        if architecture != "llama":
            raise Refused(f"general.architecture is '{architecture}', known: llama")
        for key in self.fields:
            if key.startswith("llama.") and key.removeprefix("llama.") not in KNOWN_KEYS:
                raise Refused(f"{key} is not understood")
        # This check precedes all writing, so that a refused tensor leaves no incomplete checkpoint.
        self.names = {tensor.name: checkpoint_name(tensor.name) for tensor in self.tensors}

    def find(self, key, default=None):
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key):
        if key not in self.fields:
            raise Refused(f"{key} is missing")
        return self.find(key)


def make_config(source):
    need = lambda key: source.need("llama." + key)
    heads = need("attention.head_count")
    head_dim = source.find("llama.attention.key_length", need("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.find("llama." + key, head_dim) != head_dim:
            raise Refused(f"llama.{key} is {need(key)}, must be the head dim {head_dim}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.find("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(source.find("llama.rope.freq_base", 10000)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in source.tensors),
        "vocab_size": len(source.need("tokenizer.ggml.tokens")),
        **special_ids(source),
    }


def special_ids(source):
    ids = {f"{name}_token_id": source.find(f"tokenizer.ggml.{key}_token_id")
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {name: number for name, number in ids.items() if number is not None}


def checkpoint_name(name):
    stem, dot, kind = name.rpartition(".")
    if kind == "weight":
        if stem in OUTER_TENSORS:
            return f"{OUTER_TENSORS[stem]}.weight"
        block, _, part = stem.removeprefix("blk.").partition(".")
        if stem.startswith("blk.") and part in BLOCK_TENSORS:
            return f"model.layers.{block}.{BLOCK_TENSORS[part]}.weight"
    raise Refused(f"tensor {name} is not understood")


def separate_halves(rows, heads):
    """Reverts llama.cpp's reordering of the rows of q and k. GGUF puts the two dimensions that rope
    rotates together next to each other; a checkpoint puts half a head between them."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bf16(values):
    """Rounds finite values to the nearest bf16, ties to even."""
    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def write_weights(source, config, path):
    """Writes one tensor at a time, so that memory holds one dequantised tensor."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in source.tensors:
        begin, end = end, end + 2 * int(tensor.n_elements)
        header[source.names[tensor.name]] = {
            "dtype": "BF16", "shape": [int(size) for size in reversed(tensor.shape)],
            "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in source.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                values = separate_halves(values, heads[part])
            file.write(to_bf16(values).tobytes())


def make_tokenizer(source):
    model, pre = source.need("tokenizer.ggml.model"), source.need("tokenizer.ggml.pre")
    if model != "gpt2":
        raise Refused(f"tokenizer.ggml.model is '{model}', known: gpt2")
    if pre not in PRE_TOKENIZERS:
        raise Refused(f"tokenizer.ggml.pre is '{pre}', known: {', '.join(PRE_TOKENIZERS)}")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if source.find(f"tokenizer.ggml.{key}", False):
            raise Refused(f"tokenizer.ggml.{key} is true, which is not understood")
    tokens = source.need("tokenizer.ggml.tokens")
    types = source.find("tokenizer.ggml.token_type", [1] * len(tokens))
    added = [{"id": number, "content": token, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": kind == CONTROL_TOKEN}
             for number, (token, kind) in enumerate(zip(tokens, types))
             if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": PRE_TOKENIZERS[pre], "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: number for number, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in source.need("tokenizer.ggml.merges")]},
    }


def make_tokenizer_config(source, config):
    tokens = source.need("tokenizer.ggml.tokens")
    result = {"tokenizer_class": "PreTrainedTokenizerFast",
              "model_max_length": config["max_position_embeddings"],
              "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos", "pad"):
        if f"{name}_token_id" in config:
            result[f"{name}_token"] = tokens[config[f"{name}_token_id"]]
    template = source.find("tokenizer.chat_template")
    return result if template is None else result | {"chat_template": template}


def convert(path, folder):
    source = Source(path)
    config = make_config(source)
    documents = {"config.json": config, "generation_config.json": special_ids(source),
                 "tokenizer.json": make_tokenizer(source),
                 "tokenizer_config.json": make_tokenizer_config(source, config)}
    os.makedirs(folder, exist_ok=True)
    for name, document in documents.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(document, file, ensure_ascii=False, indent=None if "tokenizer.j" in name else 2)
            file.write("\n")
    write_weights(source, config, os.path.join(folder, "model.safetensors"))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1])
    try:
        convert(*sys.argv[1:])
    except (Refused, OSError, ValueError) as problem:
        sys.exit(f"{sys.argv[1]}: {problem}")


if __name__ == "__main__":
    main()
