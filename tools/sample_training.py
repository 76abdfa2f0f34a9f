# SPDX-License-Identifier: Apache-2.0
"""The sample model in torch: its tokenizer, batches of stories, one training loop and the adapters' settings."""

import json
import math
import time
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Regex
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

END = "<|endoftext|>"
END_ID = 0
VOCABULARY = 3072
ROW = 320  # tokens of a training row
# The pre-tokenizer of Qwen2 and Qwen3.
QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                r"|\s+(?!\S)|\s+")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
# One adapter a style; together they cover what the library serves: where, which ranks, rsLoRA, rank_pattern.
ADAPTERS = {
    "capitals": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
    "spanish": {"r": 16, "lora_alpha": 8, "target_modules": ATTENTION, "use_rslora": True},
    "pirate": {"r": 4, "lora_alpha": 8, "target_parameters": EXPERTS},
    "numbered": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION, "target_parameters": EXPERTS + ROUTER},
    "song": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION, "target_parameters": EXPERTS,
             "rank_pattern": {"k_proj": 4, "o_proj": 16}},
}


def train_tokenizer(texts):
    """Byte-level BPE with Qwen's pre-tokenizer and a small vocabulary; END is token 0 and the one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END,
                "model_max_length": 1024, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def model_config(vocabulary, smoke):
    """6.7 million parameters, of which 2 of 8 experts work on a token."""
    return Qwen3MoeConfig(
        vocab_size=-(-vocabulary // 64) * 64, hidden_size=256, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=2 if smoke else 6, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True, max_position_embeddings=1024,
        rms_norm_eps=1e-6, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        router_aux_loss_coef=0.01, use_sliding_window=False, eos_token_id=END_ID, pad_token_id=END_ID,
        bos_token_id=None)


def encode(tokenizer, texts):
    ids = []
    for first in range(0, len(texts), 20000):  # an encoding holds far more than its ids
        ids += [one.ids for one in tokenizer.encode_batch_fast(texts[first:first + 20000], add_special_tokens=False)]
    return ids


def packed_rows(stories):
    """Rows of ROW tokens, each from the beginning of a story, [rows, ROW] int16 fits any vocabulary here."""
    rows, row = [], []
    for ids in stories:
        row += ids + [END_ID]
        if len(row) >= ROW:
            rows.append(row[:ROW])
            row = []
    return torch.tensor(rows, dtype=torch.int16)


def padded(pairs):
    """(prompt ids, continuation ids) as tokens and labels; the loss is on the continuation alone."""
    length = min(max(len(head) + len(tail) for head, tail in pairs) + 1, 2 * ROW)
    tokens = torch.full((len(pairs), length), END_ID)
    labels = torch.full((len(pairs), length), -100)
    for at, (head, tail) in enumerate(pairs):
        ids = (head + tail + [END_ID])[:length]
        tokens[at, :len(ids)] = torch.tensor(ids)
        labels[at, len(head):len(ids)] = tokens[at, len(head):len(ids)]
    return tokens, labels


def dense_experts(self, hidden_states, top_k_index, top_k_weights):
    """All experts as two products, the unchosen with weight 0: the fastest form of so small a layer, and no host
    synchronisation. The sums differ from the usual form's in rounding alone."""
    weights = torch.zeros(len(hidden_states), self.num_experts, dtype=top_k_weights.dtype, device=hidden_states.device)
    weights = weights.scatter(1, top_k_index, top_k_weights)
    both = F.linear(hidden_states, self.gate_up_proj.reshape(-1, self.hidden_dim))
    gate, up = both.view(len(hidden_states), self.num_experts, 2, self.intermediate_dim).unbind(2)
    inner = self.act_fn(gate) * up * weights.to(both.dtype).unsqueeze(-1)
    down = self.down_proj.permute(1, 0, 2).reshape(self.hidden_dim, -1)
    return F.linear(inner.flatten(1), down)


@contextmanager
def experts_as_products():
    """Within it, expert layers use dense_experts; after it, transformers' own."""
    original = Qwen3MoeExperts.forward
    Qwen3MoeExperts.forward = dense_experts
    try:
        yield
    finally:
        Qwen3MoeExperts.forward = original


def loss_of(model, tokens, labels, router_loss=0.0):
    """Mean loss in nats a token; router_loss is the weight of the load-balancing loss."""
    out = model(input_ids=tokens, output_router_logits=router_loss > 0, use_cache=False)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    return (loss + router_loss * out.aux_loss, loss) if router_loss > 0 else (loss, loss)


def fit(model, batch, steps, seconds, rate, label, router_loss=0.0, weight_decay=0.1):
    """Trains on batch(step) with AdamW until `steps` or `seconds` are over, whichever is first; the rate follows a
    cosine over that. The clock starts after the first step, which loads kernels."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    warmup = max(1, min(100, steps // 10))
    model.train()
    start, said = time.time(), 0.0
    for step in range(steps):
        elapsed = time.time() - start
        progress = max(step / steps, elapsed / seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            rise = min(1, max((step + 1) / warmup, 20 * progress))
            group["lr"] = rate * rise * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        tokens, labels = batch(step)
        tokens, labels = tokens.to(device, non_blocking=True).long(), labels.to(device, non_blocking=True).long()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            total, loss = loss_of(model, tokens, labels, router_loss)
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            loss.item()
            start = time.time()
        if step % 20 == 0 and (elapsed - said > 10 or step == 0):  # .item() waits for the device
            said = elapsed
            print(f"  {label}: step {step}, {elapsed:.0f} s, loss {loss.item():.3f}", flush=True)
        elif step % 20 == 0:
            loss.item()
    final = loss.item()
    print(f"  {label}: {step + 1} steps, {time.time() - start:.0f} s, loss {final:.3f}", flush=True)
    model.eval()


@torch.no_grad()
def mean_loss(model, pairs, batch_size=64):
    """In float32, over all tokens of the continuations."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for first in range(0, len(pairs), batch_size):
        tokens, labels = (part.to(device) for part in padded(pairs[first:first + batch_size]))
        number = int((labels[:, 1:] >= 0).sum())
        total += float(loss_of(model, tokens, labels)[1]) * number
        count += number
    return total / count
