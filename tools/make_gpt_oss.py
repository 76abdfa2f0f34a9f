#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint with gpt-oss-20b's shapes and names and random values: MXFP4 experts (blocks and scales as
openai/gpt-oss-20b stores them), the rest in bf16, sharded safetensors with an index; 13.8 GB.

    make_gpt_oss.py DIR [--layers 24] [--vocab 201088] [--shard-gb 4.8] [--seed 1]

Fewer layers and a smaller vocabulary give a model of the same layer shape for quick checks. Needs Python alone.
"""

import argparse
import json
import random
import struct
from pathlib import Path

HIDDEN = INNER = 2880
EXPERTS = 32
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
POOL_BYTES = 1 << 22  # values repeat after that many bytes, from another place in each piece


def config(layers, vocab):
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 4, "experts_per_token": 4,
        "vocab_size": vocab, "tie_word_embeddings": False, "attention_bias": True, "attention_dropout": 0.0,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                         "original_max_position_embeddings": 4096, "truncate": False},
        "max_position_embeddings": 131072, "initial_context_length": 4096, "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0, "sliding_window": 128, "hidden_act": "silu",
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "eos_token_id": min(200002, vocab - 1), "pad_token_id": min(199999, vocab - 1),
        "quantization_config": {"quant_method": "mxfp4",
                                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                           "model.embed_tokens", "lm_head"]},
    }


def tensors(layers, vocab):
    """(name, dtype, shape, kind of values) in the order of the files."""
    yield "model.embed_tokens.weight", "BF16", [vocab, HIDDEN], "matrix"
    for i in range(layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", "BF16", [HIDDEN], "norm"
        attention = layer + "self_attn."
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            yield f"{attention}{name}_proj.weight", "BF16", [rows, HIDDEN], "matrix"
            yield f"{attention}{name}_proj.bias", "BF16", [rows], "matrix"
        yield attention + "o_proj.weight", "BF16", [HIDDEN, HEADS * HEAD_DIM], "matrix"
        yield attention + "o_proj.bias", "BF16", [HIDDEN], "matrix"
        yield attention + "sinks", "BF16", [HEADS], "matrix"
        yield layer + "post_attention_layernorm.weight", "BF16", [HIDDEN], "norm"
        mlp = layer + "mlp."
        yield mlp + "router.weight", "BF16", [EXPERTS, HIDDEN], "matrix"
        yield mlp + "router.bias", "BF16", [EXPERTS], "matrix"
        for name, rows, cols in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            yield f"{mlp}experts.{name}_blocks", "U8", [EXPERTS, rows, cols // 32, 16], "nibbles"
            yield f"{mlp}experts.{name}_scales", "U8", [EXPERTS, rows, cols // 32], "scales"
            yield f"{mlp}experts.{name}_bias", "BF16", [EXPERTS, rows], "matrix"
    yield "model.norm.weight", "BF16", [HIDDEN], "norm"
    yield "lm_head.weight", "BF16", [vocab, HIDDEN], "matrix"


def byte_count(dtype, shape):
    count = 2 if dtype == "BF16" else 1
    for size in shape:
        count *= size
    return count


class Values:
    """Random bytes of each kind, out of pools."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        low, high = self.random.randbytes(POOL_BYTES // 2), self.random.randbytes(POOL_BYTES // 2)
        matrix = bytearray(POOL_BYTES)
        matrix[0::2] = low
        # Sign and exponent: magnitudes of 2^-8 to 2^-5, about 1 / sqrt(2880).
        matrix[1::2] = high.translate(bytes((byte & 0x80) | (0x3B + (byte & 1)) for byte in range(256)))
        self.pools = {
            "matrix": bytes(matrix),
            "norm": b"\x80\x3f" * (POOL_BYTES // 2),  # 1.0
            "nibbles": self.random.randbytes(POOL_BYTES),
            # Four exponents that make rows of 2880 random nibbles about 1 long.
            "scales": self.random.randbytes(POOL_BYTES).translate(bytes(118 + byte % 4 for byte in range(256))),
        }

    def write(self, file, kind, count):
        pool = self.pools[kind]
        while count > 0:
            at = self.random.randrange(POOL_BYTES // 4) * 2
            piece = pool[at:at + count]
            file.write(piece)
            count -= len(piece)


def write_shard(path, entries, values):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in entries:
        end = offset + byte_count(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, dtype, shape, kind in entries:
            values.write(file, kind, byte_count(dtype, shape))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=201088)
    parser.add_argument("--shard-gb", type=float, default=4.8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shards, used = [[]], 0
    for entry in tensors(options.layers, options.vocab):
        count = byte_count(entry[1], entry[2])
        if shards[-1] and used + count > options.shard_gb * 1e9:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += count
    options.dir.mkdir(parents=True, exist_ok=True)
    values, weight_map, total = Values(options.seed), {}, 0
    for i, entries in enumerate(shards):
        name = f"model-{i:05d}-of-{len(shards) - 1:05d}.safetensors"
        write_shard(options.dir / name, entries, values)
        weight_map.update({entry[0]: name for entry in entries})
        total += sum(byte_count(entry[1], entry[2]) for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (options.dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (options.dir / "config.json").write_text(json.dumps(config(options.layers, options.vocab), indent=1))
    print(f"{options.dir}: {total} bytes of weights in {len(shards)} files")


if __name__ == "__main__":
    main()
