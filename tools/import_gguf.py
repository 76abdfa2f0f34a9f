#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a Llama-architecture GGUF file as a Hugging Face model folder in bf16.

Called by tools/fetch_smollm2.sh (and so by samples/smollm2.sh and the tests) to turn SmolLM2-135M-Instruct into a
dense LlamaForCausalLM and, with --experts 4, into the same network upcycled to a MixtralForCausalLM. The rounding,
the row order and the formulas of the upcycling are fixed: the reference logits in tests/data/cases/smollm2* were
computed from exactly these bytes. Needs numpy and gguf. The folder appears under its name only when it is complete.
"""

import argparse
import json
import math
import os
import shutil
import struct
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

SPECIAL_TOKEN_TYPE = 3  # GGUF's "control" tokens
ROUTER_AMPLITUDE = 0.1
ROUTER_FREQUENCY = 0.7
EXPERT_SPREAD = 0.1


class Gguf:
    """Fields and dequantised tensors of one file."""

    def __init__(self, path):
        self.reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.path = path
        if self.field("general.architecture") != "llama":
            raise SystemExit(f"{path}: architecture is {self.field('general.architecture')!r}, only 'llama' is read")

    def field(self, name, default=None):
        if name not in self.reader.fields:
            if default is None:
                raise SystemExit(f"{self.path}: no field {name!r}")
            return default
        return self.reader.fields[name].contents()

    def shape(self, name):
        if name not in self.tensors:
            raise SystemExit(f"{self.path}: no tensor {name!r}")
        return [int(extent) for extent in reversed(self.tensors[name].shape)]

    def read(self, name):
        shape = self.shape(name)
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)


def to_bf16(values):
    """Round to nearest even, as bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def hugging_face_rows(weight, num_heads):
    """GGUF keeps rotated pairs adjacent (row 2i, 2i + 1); Hugging Face keeps the halves apart (i, i + d/2)."""
    rows, columns = weight.shape
    head_dim = rows // num_heads
    return weight.reshape(num_heads, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def router_weight(num_experts, hidden):
    expert = np.arange(1, num_experts + 1, dtype=np.float64)[:, None]
    column = np.arange(1, hidden + 1, dtype=np.float64)[None, :]
    return (ROUTER_AMPLITUDE * np.sin(ROUTER_FREQUENCY * expert * column)).astype(np.float32)


def expert_scale(expert, num_experts):
    return np.float32(1.0 + EXPERT_SPREAD * (expert - (num_experts - 1) / 2.0))


def attention_entries(gguf, layer, num_heads, num_kv_heads):
    blk, out = f"blk.{layer}.", f"model.layers.{layer}."

    def read(name):
        return lambda: gguf.read(name)

    def rotated(name, heads):
        return lambda: hugging_face_rows(gguf.read(name), heads)

    yield out + "input_layernorm.weight", gguf.shape(blk + "attn_norm.weight"), read(blk + "attn_norm.weight")
    for ours, theirs, heads in (("q", "attn_q", num_heads), ("k", "attn_k", num_kv_heads)):
        name = blk + theirs + ".weight"
        yield out + f"self_attn.{ours}_proj.weight", gguf.shape(name), rotated(name, heads)
    for ours, theirs in (("v", "attn_v"), ("o", "attn_output")):
        name = blk + theirs + ".weight"
        yield out + f"self_attn.{ours}_proj.weight", gguf.shape(name), read(name)
    yield out + "post_attention_layernorm.weight", gguf.shape(blk + "ffn_norm.weight"), read(blk + "ffn_norm.weight")


def dense_entries(gguf, layer):
    for name in ("gate", "up", "down"):
        source = f"blk.{layer}.ffn_{name}.weight"
        yield (f"model.layers.{layer}.mlp.{name}_proj.weight", gguf.shape(source),
               lambda source=source: gguf.read(source))


def moe_entries(gguf, layer, num_experts, hidden):
    out = f"model.layers.{layer}.block_sparse_moe."
    yield out + "gate.weight", [num_experts, hidden], lambda: router_weight(num_experts, hidden)
    for expert in range(num_experts):
        for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            source = f"blk.{layer}.ffn_{theirs}.weight"
            scale = expert_scale(expert, num_experts) if ours == "w2" else None

            def read(source=source, scale=scale):
                weight = gguf.read(source)
                return weight if scale is None else weight * scale

            yield out + f"experts.{expert}.{ours}.weight", gguf.shape(source), read


def entries(gguf, num_experts):
    """(name, shape, function that gives float32 values) of each tensor, in file order."""
    hidden = int(gguf.field("llama.embedding_length"))
    num_heads = int(gguf.field("llama.attention.head_count"))
    num_kv_heads = int(gguf.field("llama.attention.head_count_kv"))
    yield "model.embed_tokens.weight", gguf.shape("token_embd.weight"), lambda: gguf.read("token_embd.weight")
    for layer in range(int(gguf.field("llama.block_count"))):
        yield from attention_entries(gguf, layer, num_heads, num_kv_heads)
        if num_experts:
            yield from moe_entries(gguf, layer, num_experts, hidden)
        else:
            yield from dense_entries(gguf, layer)
    yield "model.norm.weight", gguf.shape("output_norm.weight"), lambda: gguf.read("output_norm.weight")
    if "output.weight" in gguf.tensors:
        yield "lm_head.weight", gguf.shape("output.weight"), lambda: gguf.read("output.weight")


def write_safetensors(path, tensors):
    tensors = list(tensors)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, _ in tensors:
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name, shape, read in tensors:
            values = read()
            if list(values.shape) != shape:
                raise SystemExit(f"{name}: shape {list(values.shape)}, the header says {shape}")
            file.write(to_bf16(values).tobytes())
    return offset


def model_config(gguf, num_experts):
    num_heads = int(gguf.field("llama.attention.head_count"))
    hidden = int(gguf.field("llama.embedding_length"))
    # The file holds float32 numbers; the shortest decimal that gives the same float32 is the one that was meant.
    config = {
        "architectures": ["MixtralForCausalLM" if num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if num_experts else "llama",
        "bos_token_id": int(gguf.field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(gguf.field("tokenizer.ggml.eos_token_id")),
        "dtype": "bfloat16",
        "head_dim": hidden // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(gguf.field("llama.feed_forward_length")),
        "max_position_embeddings": int(gguf.field("llama.context_length")),
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(gguf.field("llama.block_count")),
        "num_key_value_heads": int(gguf.field("llama.attention.head_count_kv")),
        "rms_norm_eps": float(str(np.float32(gguf.field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_theta": float(str(np.float32(gguf.field("llama.rope.freq_base")))),
                            "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": gguf.shape("token_embd.weight")[0],
    }
    if num_experts:
        config.update({"num_local_experts": num_experts, "num_experts_per_tok": 2, "sliding_window": None})
    else:
        config.update({"attention_bias": False, "mlp_bias": False})
    return config


def tokenizer(gguf):
    """Byte-level BPE of the GGUF's tokens and merges; nothing is added to a text."""
    tokens = gguf.field("tokenizer.ggml.tokens")
    types = gguf.field("tokenizer.ggml.token_type")
    merges = [merge.split(" ") for merge in gguf.field("tokenizer.ggml.merges")]
    special = [{"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True}
               for index, (token, kind) in enumerate(zip(tokens, types)) if kind == SPECIAL_TOKEN_TYPE]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges},
    }


def tokenizer_config(gguf):
    tokens = gguf.field("tokenizer.ggml.tokens")
    return {
        "add_bos_token": False,
        "bos_token": tokens[int(gguf.field("tokenizer.ggml.bos_token_id"))],
        "eos_token": tokens[int(gguf.field("tokenizer.ggml.eos_token_id"))],
        "chat_template": gguf.field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")


def convert(source, target, num_experts):
    gguf = Gguf(source)
    config = model_config(gguf, num_experts)
    partial = target.rstrip("/") + f".partial.{os.getpid()}"
    os.makedirs(partial)
    try:
        write_json(os.path.join(partial, "config.json"), config)
        write_json(os.path.join(partial, "generation_config.json"),
                   {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"],
                    "pad_token_id": int(gguf.field("tokenizer.ggml.padding_token_id"))})
        write_json(os.path.join(partial, "tokenizer.json"), tokenizer(gguf))
        write_json(os.path.join(partial, "tokenizer_config.json"), tokenizer_config(gguf))
        size = write_safetensors(os.path.join(partial, "model.safetensors"), entries(gguf, num_experts))
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    kind = f"{num_experts} experts" if num_experts else "dense"
    print(f"{target}: {config['architectures'][0]}, {kind}, {size / 1e6:.0f} MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf", help="GGUF file of a Llama-architecture model")
    parser.add_argument("folder", help="Hugging Face folder to write (replaced if it exists)")
    parser.add_argument("--experts", type=int, default=0, help="0: dense; N: upcycle to N experts, top 2")
    arguments = parser.parse_args()
    if arguments.experts < 0 or arguments.experts == 1:
        parser.error("--experts must be 0 or at least 2")
    if not os.path.isfile(arguments.gguf):
        parser.error(f"{arguments.gguf}: no such file")
    convert(arguments.gguf, arguments.folder, arguments.experts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
