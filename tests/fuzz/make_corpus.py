#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/fuzz/corpus: one small file for every way a file can be wrong, and some good ones.

A name that starts with bad_ promises an Error; safetensors files promise that it names the tensor
'weights', unless the name starts with bad_file_.
"""
import json
import pathlib
import random
import struct

OUT = pathlib.Path(__file__).resolve().parent / "corpus"


def write(folder, name, data):
    (OUT / folder).mkdir(parents=True, exist_ok=True)
    (OUT / folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def stored(header, data=b"", length=None):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors():
    def put(name, *args, **options):
        write("safetensors", name + ".safetensors", stored(*args, **options))

    good = tensor("F32", [2], 0, 8)
    data = bytes(range(8))
    put("good", {"__metadata__": {"format": "pt"}, "weights": good,
                 "scale": tensor("BF16", [1, 2], 8, 12), "empty": tensor("I64", [0, 5], 12, 12),
                 "mask": tensor("BOOL", [4], 12, 16)}, bytes(16))
    put("good_no_tensors", {})
    put("good_metadata_null", {"__metadata__": None, "weights": good}, data)
    put("good_extra_field", {"weights": {"extra": [{"shape": None}, 2.5], **good, "more": -1}}, data)
    put("good_leading_newline", "\n" + json.dumps({"weights": good}) + " \n", data)
    put("bad_null", {"weights": None})
    put("bad_depth_bomb_extra", '{"weights":{"extra":' + "[" * 5000)
    put("bad_file_nul_behind_header", json.dumps({"weights": good}) + "\0" * 8, data)
    put("bad_file_metadata_null_twice", '{"__metadata__":null,"__metadata__":null}')
    # 4 * 2^62 and 4 * 2^32 * 2^32 are 0 in 64 bits; 2 * (2^63 + 2) is 4.
    put("bad_product_overflow", {"weights": tensor("F32", [2**62], 0, 0)})
    put("bad_product_overflow_two", {"weights": tensor("F32", [2**32, 2**32], 0, 0)})
    put("bad_product_wraps_to_4", {"weights": tensor("U8", [2, 2**63 + 2], 0, 4)}, bytes(4))
    put("bad_begin_after_end", {"weights": tensor("F32", [2], 8, 0)}, data)
    put("bad_begin_after_end_wraps", {"weights": tensor("F32", [2], 2**64 - 8, 0)}, data)
    put("bad_negative_offset", {"weights": tensor("F32", [2], -8, 0)}, data)
    put("bad_negative_dimension", {"weights": tensor("F32", [-2], 0, 8)}, data)
    put("bad_float_offset", {"weights": tensor("F32", [2], 0.0, 8.0)}, data)
    put("bad_huge_offset", {"weights": tensor("F32", [2], 0, 10**30)}, data)
    put("bad_overlap", {"first": good, "weights": tensor("F32", [2], 4, 12)}, bytes(12))
    put("bad_overlap_same", {"first": good, "weights": good}, data)
    put("bad_gap", {"first": good, "weights": tensor("F32", [1], 12, 16)}, bytes(16))
    put("bad_data_left_over", {"weights": good}, bytes(9))
    put("bad_truncated_data", {"weights": good}, bytes(7))
    put("bad_wrong_bytes", {"weights": tensor("F32", [3], 0, 8)}, data)
    put("bad_wrong_dtype", {"weights": tensor("F33", [2], 0, 8)}, data)
    put("bad_dtype_number", {"weights": tensor(32, [2], 0, 8)}, data)
    put("bad_no_shape", {"weights": {"dtype": "F32", "data_offsets": [0, 8]}}, data)
    put("bad_third_offset", {"weights": {**good, "data_offsets": [0, 8, 16]}}, data)
    put("bad_many_dimensions", {"weights": tensor("F32", [1] * 17 + [2], 0, 8)}, data)
    put("bad_duplicate_name", '{"weights":%s,"weights":%s}' %
        (json.dumps(good), json.dumps(tensor("F32", [2], 8, 16))), bytes(16))
    put("bad_duplicate_field", '{"weights":{"dtype":"F32","dtype":"F32","shape":[2],'
        '"data_offsets":[0,8]}}', data)
    put("bad_depth_bomb", '{"weights":' + "[" * 5000)
    put("bad_depth_bomb_objects", '{"weights":' + '{"shape":' * 1000)
    put("bad_truncated_header_text", '{"weights":{"dtype":"F3')
    put("bad_not_utf8", b'{"weights":{"dtype":"\xff'.decode("latin-1"))
    put("bad_file_header_length_100mb_and_1", {"weights": good}, data, length=100_000_001)
    put("bad_file_header_length_max", {"weights": good}, data, length=2**64 - 1)
    put("bad_file_header_past_the_end", {"weights": good}, data, length=1000)
    put("bad_file_no_header", "", length=0)
    put("bad_file_array", "[]")
    put("bad_file_gap_of_all", {}, data)
    put("bad_file_metadata_number", {"__metadata__": {"format": 1}})
    write("safetensors", "bad_file_7_bytes.safetensors", bytes(7))
    write("safetensors", "bad_file_empty.safetensors", b"")


def config():
    def put(name, text):
        write("config", name + ".json", text)

    put("good", json.dumps({"architectures": ["LlamaForCausalLM"], "n": 4, "big": 2**64 - 1, "f": 1e4,
                            "minus": -2**63, "none": None, "eos": [1, 2], "tied": True,
                            "rope": {"factor": 8.0, "list": [{"a": 1}, {"b": [[]]}]}}))
    put("bad_empty", "")
    put("bad_array", "[1]")
    put("bad_truncated", '{"a": [1, 2')
    put("bad_depth_bomb", '{"a":' + "[" * 5000)
    put("bad_depth_bomb_objects", '{"a":' * 1000)
    put("bad_duplicate_key", '{"a": 1, "a": 2}')
    put("bad_number", '{"a": 1e999}')
    put("bad_not_utf8", b'{"a": "\xff"}')
    put("bad_nan", '{"a": NaN}')
    put("bad_trailing", '{"a": 1} {}')
    put("bad_nul_behind", '{"a": 1}\0')
    put("bad_text_behind_a_nul", '{"a": 1}\0{"a": 2}')


def index():
    def put(name, text):
        write("index", name + ".json", text if isinstance(text, str) else json.dumps(text))

    put("good", {"metadata": {"total_size": 8, "weight_map": [[]]},
                 "weight_map": {"b": "two", "a": "one", "c": "two"}})
    put("bad_empty", "")
    put("bad_number", "7")
    put("bad_no_weight_map", {"metadata": {}})
    put("bad_weight_map_empty", {"weight_map": {}})
    put("bad_weight_map_array", {"weight_map": ["a"]})
    put("bad_shard_null", {"weight_map": {"a": None}})
    put("bad_shard_object", {"weight_map": {"a": {"b": "c"}}})
    put("bad_shard_outside", {"weight_map": {"a": "../b"}})
    put("bad_shard_nul", {"weight_map": {"a": "b\0"}})
    put("bad_tensor_twice", '{"weight_map": {"a": "x", "a": "x"}}')
    put("bad_truncated", '{"weight_map": {"a": "x"')
    put("bad_depth_bomb", '{"metadata":' + "[" * 5000)
    put("bad_nul_behind", '{"weight_map": {"a": "x"}}\0')


def tokenizer():
    def put(name, data, text=""):
        write("tokenizer", name, json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\0" + text)

    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    vocab = {letters[b]: b for b in range(256)}
    vocab.update({"ab": 256, "abc": 257})
    good = {
        "added_tokens": [{"id": 258, "content": "<e>", "special": True, "lstrip": True}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{L}{1,3}|\s+(?!\S)|(?i:'s)"},
             "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<e>"}}, {"Sequence": {"id": "A"}}],
                           "special_tokens": {"<e>": {"ids": [258]}}},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", ["ab", "c"]]}}
    put("good.json", good, "abcabc  <e> it's\n")

    def changed(**fields):
        return {**good, **fields}

    model = good["model"]
    put("bad_merge_unknown.json", changed(model={**model, "merges": ["a zz"]}))
    put("bad_merge_number.json", changed(model={**model, "merges": [1]}))
    put("bad_ids_twice.json", changed(model={**model, "vocab": {**vocab, "zz": 0}}))
    put("bad_id_huge.json", changed(model={**model, "vocab": {**vocab, "zz": 2**40}}))
    put("vocabulary_short.json", changed(model={**model, "vocab": {"a": 0}, "merges": []}), "abc\x01")
    put("bad_pattern.json", changed(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "(" * 500}, "behavior": "Isolated"}))
    put("bad_pattern_empty.json", changed(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated"}))
    put("bad_added_id.json", changed(added_tokens=[{"id": 3, "content": "<e>"}]))
    put("bad_template.json", changed(post_processor={"type": "TemplateProcessing", "single": []}))
    spaced = {"\u2581a": 3, "\u2581": 4, "a": 5, "b": 6, "<unk>": 0, "<0x0A>": 7}
    put("spaced.json", {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"},
            {"type": "Replace", "pattern": {"Regex": "[ x]+"}, "content": "\u2581"}, {"type": "Nmt"},
            {"type": "Strip", "strip_left": True, "strip_right": True}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 1}]},
        "added_tokens": [{"id": 8, "content": "<t>", "single_word": True, "normalized": True, "rstrip": True}],
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": spaced,
                  "merges": ["\u2581 a"]}}, " a bb \u00e9\n <t> xx ")
    put("unigram.json", {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Punctuation"}, {"type": "Split", "pattern": {"String": "a"}, "behavior": "MergedWithNext"},
            {"type": "Metaspace"}]},
        "decoder": {"type": "Metaspace"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["\u2581", -1.5], ["ab", -2], ["a", -3.25]]}},
        "abba, ab!")
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAAA"}
    put("charsmap.json", changed(normalizer=charsmap), "a")
    put("bad_charsmap.json", changed(normalizer={**charsmap, "precompiled_charsmap": "////fwAA"}), "a")
    put("bad_unigram_score.json", {"model": {"type": "Unigram", "vocab": [["a", "b"]]}})
    put("bad_unigram_unk.json", {"model": {"type": "Unigram", "unk_id": 1, "vocab": [["a", 0]]}})
    put("bad_vocabulary_nested.json", {"model": {"vocab": {"a": {"b": 1}}, "merges": []}})
    put("bad_merges_object.json", changed(model={**model, "merges": {"a": "b"}}))
    put("bad_added_nested.json", changed(added_tokens=[[{}]]))
    write("tokenizer", "bad_depth_bomb.json", '{"model":' + "[" * 5000)
    write("tokenizer", "text_words", "It's 12345 WE'RE camelCase  \n\n naïve 日本語 🙂!!! ")
    write("tokenizer", "text_bytes", bytes(range(1, 256)))
    write("tokenizer", "text_special", "<|begin|>a <|think|>  <|end|><|en")


def sentencepiece():
    def put(name, data):
        write("sentencepiece", name + ".model", data)

    def varint(number):
        out = b""
        while number > 127:
            out, number = out + bytes([number & 127 | 128]), number >> 7
        return out + bytes([number])

    def message(field, data):
        return varint(field << 3 | 2) + varint(len(data)) + data

    def number(field, value):
        return varint(field << 3) + varint(value)

    def piece(text, score=-1.0, kind=1):
        return message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))

    specials = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3)
    letters = piece("\u2581") + piece("a") + piece("b") + piece("\u2581a", -0.5) + piece("ab", -0.25) + piece("<0x0A>", 0, 6)
    bpe = message(2, number(3, 2) + number(35, 1))
    plain = message(3, number(4, 0))
    good = specials + letters + bpe + plain
    put("good_bpe", good)
    put("good_unigram", specials + letters + message(2, number(3, 1)))
    put("good_user_defined", good + piece("\n\n", 0, 4))
    put("good_unknown_fields", good + number(200, 1) + message(201, b"x") + b"\x1d" + bytes(4))
    put("good_unigram_unused", specials + letters + piece("ba", -0.1, 5))
    put("bad_empty", b"")
    put("bad_no_pieces", bpe + plain)
    put("bad_truncated", good[:-2])
    put("bad_length", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
    put("bad_varint", b"\x08" + b"\xff" * 11)
    put("bad_group", b"\x0b")
    put("bad_field_zero", b"\x00\x00")
    put("bad_text", specials + message(1, message(1, b"\xff")))
    put("bad_text_empty", specials + message(1, b""))
    put("bad_score", specials + piece("a", float("inf")))
    put("bad_kind", specials + piece("a", 0, 9))
    put("bad_word_model", specials + letters + message(2, number(3, 3)))
    put("bad_unused", good + piece("ba", -0.1, 5))
    put("bad_charsmap", good + message(3, message(2, b"\x08\x00\x00\x00abc")))
    put("bad_piece_twice", good + piece("<s>", 0, 3))


def chat_template():
    """Templates, and the messages behind a zero byte."""
    chat = json.dumps([{"role": "user", "content": "Hi \u00e9"}, {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "f", "arguments": {"x": [1, 2.5, True]}}}]}])

    def put(name, source, messages=chat):
        write("chat_template", name, source.encode() + b"\0" + messages.encode())

    write("chat_template", "good_no_messages", "{{ bos_token }}{% if messages is defined %}{% endif %}")
    put("good_chatml", "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' ~ m['content'] }}{% endfor %}")
    put("good_calls", "{%- macro call(c) -%}{{ c.name }}{{ c.arguments | tojson(indent=2) }}{%- endmacro -%}"
        "{% for m in messages if m.tool_calls %}{{ call(m.tool_calls[0].function) }}{% endfor %}")
    put("good_namespace", "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n ** 2 // 3 % 5 }}")
    put("good_texts", "{{ ' a,b '.strip().split(',')[::-1] | join('-') | upper | replace('A', 'x') }}"
        "{{ '%s' % 'y' }}{{ '{}'.format(1) }}{{ 'a b'.title()[1:] }}")
    put("good_filters", "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | list | first }}"
        "{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort | sum }}{{ 'x\\ny' | indent(2) }}")
    put("good_blocks", "{% set t %}a{% filter upper %}b{% endfilter %}{% endset %}{% with y = t %}{{ y }}{% endwith %}"
        "{% generation %}c{% endgeneration %}{% raw %}{{{% endraw %}{# d #}")
    put("bad_open", "{% if messages %}")
    put("bad_string", "{{ 'abc }}")
    put("bad_filter", "{{ 1 | nothing }}")
    put("bad_deep", "{{ " + "(" * 5000)
    put("bad_loop", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    put("bad_recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    put("bad_doubling", "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}")
    put("bad_raised", "{{ raise_exception('stop') }}")
    put("bad_json", "{{ messages }}", "[{")
    put("bad_number", "{{ messages }}", "99999999999999999999")


def json_schema():
    """A JSON schema, a zero byte, and bytes that choose a text of it."""
    def put(name, schema, text=b'{"a": [1, "\\u00e9"]}'):
        source = schema if isinstance(schema, str) else json.dumps(schema)
        write("json_schema", name, source.encode() + b"\0" + text)

    put("good_any", True)
    put("good_object", {"type": "object"})
    put("good_members", {"type": "object", "properties": {"a": {"type": "array"}, "b": {"const": {"c": [1, None]}}},
                         "required": ["a"], "additionalProperties": {"type": "integer"}})
    put("good_items", {"type": "array", "items": {"enum": ["x", "xy", 1.5, False]}, "minItems": 2, "maxItems": 4})
    put("good_string", {"type": "string", "minLength": 2, "maxLength": 5}, b'"a\xc3\xa9\\n')
    put("good_integer", {"type": "integer", "minimum": -12, "exclusiveMaximum": 340}, b"-7")
    put("good_numbers", {"type": ["number", "null"]}, b"-1.5e+3")
    put("good_choice", {"oneOf": [{"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
                                  {"type": "object", "properties": {"k": {"const": 2}}, "required": ["k"]}]})
    put("good_recursion", {"$defs": {"t": {"type": "object", "properties": {"a": {"type": "array", "items": {
        "$ref": "#/$defs/t"}}}}}, "$ref": "#/$defs/t"}, b'{"a":[{"a":[')
    put("good_recursion_of_itself", {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}, b"[[[[[[")
    put("bad_json", "{")
    put("bad_type", {"type": "frog"})
    put("bad_keyword", {"type": "string", "pattern": "a"})
    put("bad_reference", {"$ref": "#/nothing"})
    put("bad_loop", {"$ref": "#"})
    put("bad_url", {"$ref": "http://127.0.0.1/"})
    put("bad_bounds", {"type": "integer", "minimum": 5, "maximum": 1})
    put("bad_overlap", {"oneOf": [{"type": "string"}, {"type": "string"}]})
    put("bad_size", {"type": "array", "items": {"type": "string", "minLength": 30000}, "minItems": 30000})
    put("bad_depth", "[" * 5000)


def tool_calls():
    """A byte for the format, a byte for the size of pieces, and a text."""
    for number, (name, text) in enumerate((
            ("hermes", 'a <tool_call>{"name": "f", "arguments": {"x": "}"}}</tool_call>\n<tool_call>{"name": 1}'),
            ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": [1]}}'),
            ("mistral", 'a[TOOL_CALLS][{"name": "f", "arguments": {}}][TOOL_CALLS]g[ARGS]{"y": 2} <tool_'),
            ("qwen3_coder", "a <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=c>\n[1]\n"
             "</parameter>\n</function>\n</tool_call>"),
            ("glm4", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>"
             "<arg_value>null</arg_value>\n</tool_call><tool_call>g</tool_call>"),
            ("lfm2", "<|tool_call_start|>[f(a='x\\u00e9', b=[1, (True, None)]), g(c={\"d\": -2.5})]"
             "<|tool_call_end|>a <|tool_call_start|>[]<|tool_call_end|>"))):
        write("tool_calls", name, bytes([number + 1, 3]) + text.encode())


def c_interface():
    """Bytes that choose calls of the C interface; any are valid."""
    for seed in range(2):
        write("c_interface", f"calls_{seed}", random.Random(seed).randbytes(400))


if __name__ == "__main__":
    sentencepiece()
    safetensors()
    config()
    index()
    tokenizer()
    chat_template()
    json_schema()
    tool_calls()
    c_interface()
