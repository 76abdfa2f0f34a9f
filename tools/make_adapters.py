#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes N LoRA adapters of random values for a model folder, as PEFT would: OUT/0, OUT/1, ... each with an
adapter_config.json and an adapter_model.safetensors in bf16. For load tests: what they say is nonsense.

    make_adapters.py --model DIR --out OUT --count N [--rank 8] [--targets attention|experts|all] [--distinct K]

With --distinct K only the first K have values of their own and the others are hard links to them, so that thousands of
adapters of a large model fit on a disk. Needs Python alone; reads nothing but the model's config.json.
"""

import argparse
import json
import os
import random
import struct
import sys
from pathlib import Path

# The upper byte of a bf16 value holds its sign and all but the last bit of its exponent; the lower byte is free. So
# values of either sign and of magnitude 2^-9 to 2^-5 are two random bytes, the upper one of them looked up here.
UPPER = bytes((0x80 if i & 1 else 0x00) | (0x3B if i & 2 else 0x3C) for i in range(256))


def shapes(config, targets):
    """(name of the module, inputs, outputs) of each adapted linear."""
    config = config.get("text_config", config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    # Mixtral, OLMoE and gpt-oss name the width of an expert as dense models name that of their MLP.
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if targets != "experts":
            yield prefix + "self_attn.q_proj", hidden, queries
            yield prefix + "self_attn.k_proj", hidden, keys
            yield prefix + "self_attn.v_proj", hidden, keys
            yield prefix + "self_attn.o_proj", queries, hidden
        if targets != "attention":
            blocks = [f"mlp.experts.{i}." for i in range(experts)] or ["mlp."]
            for block in blocks:
                yield prefix + block + "gate_proj", hidden, width
                yield prefix + block + "up_proj", hidden, width
                yield prefix + block + "down_proj", width, hidden


def tensors(config, targets, rank):
    for module, inputs, outputs in shapes(config, targets):
        yield f"base_model.model.{module}.lora_A.weight", [rank, inputs]
        yield f"base_model.model.{module}.lora_B.weight", [outputs, rank]


def values(draw, count):
    data = bytearray(2 * count)
    data[0::2] = draw.randbytes(count)
    data[1::2] = draw.randbytes(count).translate(UPPER)
    return data


def write(folder, listed, adapter_config, seed):
    header, offset = {}, 0
    for name, shape in listed:
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = random.Random(seed)
    folder.mkdir()
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in listed:
            file.write(values(draw, shape[0] * shape[1]))
    (folder / "adapter_config.json").write_text(adapter_config)


def link(folder, original):
    folder.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        os.link(original / name, folder / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; it must not hold adapters yet")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", choices=["attention", "experts", "all"], default="attention")
    parser.add_argument("--distinct", type=int, default=0, help="different ones; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.count < 1 or args.rank < 1 or args.distinct < 0:
        parser.error("--count and --rank are 1 or more, --distinct 0 or more")
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    listed = list(tensors(config, args.targets, args.rank))
    adapter_config = json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": args.model.name, "r": args.rank,
        "lora_alpha": 2 * args.rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name, _ in listed})}, indent=2) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "0").exists():
        sys.exit(f"make_adapters.py: {args.out} holds adapters already")
    distinct = min(args.distinct or args.count, args.count)
    for i in range(args.count):
        if i < distinct:
            write(args.out / str(i), listed, adapter_config, f"{args.seed}.{i}")
        else:
            link(args.out / str(i), args.out / str(i % distinct))
    size = (args.out / "0" / "adapter_model.safetensors").stat().st_size
    print(f"{args.count} adapters, {distinct} of them different, {size} bytes each, in {args.out}")


if __name__ == "__main__":
    main()
