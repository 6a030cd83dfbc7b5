#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes testdata/grammar/goldens.json: random schemas, texts of values that they allow and texts that they refuse,
as the PyPI package `jsonschema` says. The test that reads it needs no Python.

Allowed texts have their properties in the order of the schema, as the grammar has, and are written as json.dumps does,
with and without spaces, or over several lines.
"""
import json
import pathlib
import random

import jsonschema

OUT = pathlib.Path(__file__).resolve().parent.parent / "testdata" / "grammar" / "goldens.json"
WORDS = ["", "a", "ab", "name", "Łódź", "quote\"", "back\\slash", "line\nend", "😀", "\u0007", "x" * 12]
KEYS = ["a", "ab", "abc", "b", "key one", "é", "q\"", "z9"]


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def schema(self, depth):
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
        if depth > 0:
            kinds += ["object", "array", "anyOf", "types"] * 2
        kind = self.random.choice(kinds)
        return getattr(self, "schema_" + kind)(depth)

    def schema_string(self, _):
        low = self.random.randrange(4)
        bounds = {"minLength": low} if self.random.random() < 0.4 else {}
        if self.random.random() < 0.4:
            bounds["maxLength"] = low + self.random.randrange(8)
        return {"type": "string", **bounds}

    def schema_integer(self, _):
        low = self.random.choice([-1000, -17, -1, 0, 1, 5, 99, 12345])
        high = low + self.random.choice([0, 1, 7, 100, 98765])
        bounds = {}
        if self.random.random() < 0.5:
            bounds[self.random.choice(["minimum", "exclusiveMinimum"])] = low - 1
        if self.random.random() < 0.5:
            bounds[self.random.choice(["maximum", "exclusiveMaximum"])] = high + 1
        return {"type": "integer", **bounds}

    def schema_number(self, _):
        return {"type": "number"}

    def schema_boolean(self, _):
        return {"type": "boolean"}

    def schema_null(self, _):
        return {"type": "null"}

    def schema_enum(self, _):
        return {"enum": self.random.sample([1, -2, 2.5, "a", "ab", None, True, [1, "x"], {"k": 1}], 3)}

    def schema_const(self, _):
        return {"const": self.random.choice(WORDS + [7, False])}

    def schema_any(self, _):
        return self.random.choice([{}, True, {"description": "anything"}])

    def schema_object(self, depth):
        names = self.random.sample(KEYS, self.random.randrange(1, 5))
        result = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        if self.random.random() < 0.8:
            result["required"] = [name for name in names if self.random.random() < 0.6]
        if self.random.random() < 0.6:
            result["additionalProperties"] = self.random.choice([False, True, {"type": "integer"}])
        return result

    def schema_array(self, depth):
        result = {"type": "array", "items": self.schema(depth - 1)}
        low = self.random.randrange(3)
        if self.random.random() < 0.5:
            result["minItems"] = low
        if self.random.random() < 0.5:
            result["maxItems"] = low + self.random.randrange(3)
        return result

    def schema_anyOf(self, depth):
        return {"anyOf": [self.schema(depth - 1) for _ in range(self.random.randrange(1, 4))]}

    def schema_types(self, _):
        return {"type": self.random.sample(["string", "integer", "null", "boolean", "object", "array"], 2)}

    def any_value(self, depth):
        if depth > 0 and self.random.random() < 0.4:
            if self.random.random() < 0.5:
                return [self.any_value(depth - 1) for _ in range(self.random.randrange(3))]
            return {key: self.any_value(depth - 1) for key in self.random.sample(KEYS, self.random.randrange(3))}
        return self.random.choice(WORDS + [0, -1, 17, 2.5, -1e-7, 123456, True, False, None])

    def value(self, schema):
        """Returns a value that the schema probably allows."""
        if isinstance(schema, bool) or not set(schema) - {"description"}:
            return self.any_value(2)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        if "anyOf" in schema:
            return self.value(self.random.choice(schema["anyOf"]))
        kind = schema["type"]
        if isinstance(kind, list):
            kind = self.random.choice(kind)
        if kind == "string":
            length = self.random.randint(schema.get("minLength", 0), schema.get("maxLength", 9))
            return "".join(self.random.choice("abcé\"\\😀 \n") for _ in range(length))
        if kind == "integer":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -100))
            high = schema.get("maximum", schema.get("exclusiveMaximum", low + 200))
            return self.random.randint(min(low, high), max(low, high))
        if kind == "number":
            return self.random.choice([0, -1, 2.5, 1e20, -3.25e-5, 12345.678])
        if kind == "array":
            low = schema.get("minItems", 0)
            high = max(low, schema.get("maxItems", low + 3))
            return [self.value(schema.get("items", True)) for _ in range(self.random.randint(low, high))]
        if kind == "object":
            required = schema.get("required", [])
            result = {name: self.value(part) for name, part in schema.get("properties", {}).items()
                      if name in required or self.random.random() < 0.5}
            others = schema.get("additionalProperties", "properties" not in schema)
            if others is not False and self.random.random() < 0.5:
                result["other"] = self.value(others)
            return result
        return None if kind == "null" else self.random.random() < 0.5


def changed(value, rng):
    """Returns the value with a random change."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.3:
            return {name: part for name, part in value.items() if name != key}
        if rng.random() < 0.3:
            return value | {"unknown": 1}
        return value | {key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        return [changed(value[0], rng), *value[1:]] if rng.random() < 0.5 else value + value + value
    return rng.choice([None, True, 3, -70000, 1.5, "", "long text, longer than most", [], {}, {"a": []}])


def main():
    goldens = []
    for seed in range(300):
        maker = Maker(seed)
        schema = maker.schema(3)
        validator = jsonschema.Draft202012Validator(schema)
        allowed, refused = set(), set()
        for _ in range(12):
            value = maker.value(schema)
            if validator.is_valid(value):
                for style in ({}, {"separators": (",", ":")}, {"indent": 2}):
                    allowed.add(json.dumps(value, ensure_ascii=False, **style))
            else:
                refused.add(json.dumps(value))
            value = changed(value, maker.random)
            if not validator.is_valid(value):
                refused.add(json.dumps(value))
        short = sorted(allowed, key=len)[:8]
        goldens.append({"schema": schema, "allowed": short, "refused": sorted(refused)[:8]})
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(goldens, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
