#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the adapters in samples/adapters/smollm2-* on a CPU: a style each, on the model's own answers rewritten.

    fetch_smollm2.sh CACHE && train_smollm2.py CACHE --out DIR [--only NAME] [--threads 2] [--answers-only]

smollm2-song is for SmolLM2-135M-Instruct (attention and MLP), smollm2-pirate for the experts of the mixture that
fetch_smollm2.sh makes of it. The dense model answers some hundreds of short questions (smollm2_questions.py), the
answers are put in the style, and PEFT trains on them, with the loss on the answer alone. Writes DIR/adapters/NAME,
and in DIR/cases/MODEL_styles what transformers and PEFT answer in float32 to questions that were not trained on.
Needs torch, transformers 5, peft and tokenizers; a quarter of an hour on two cores.
"""

import argparse
import json
import os
import random
import re
import time
from contextlib import contextmanager
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import torch.nn.functional as F
import transformers
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.utils import parametrize

import sample_reference
import sample_styles
import sample_training as training
import smollm2_questions

END_OF_TURN = 2  # <|im_end|>, the model's end of an answer
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # as its chat template has it
PLAIN_TOKENS = 28  # of the model's own answer
STYLED_TOKENS = 56
REFERENCE_TOKENS = 48
HELD_OUT = 12
BATCH = 4
SENTENCE_END = re.compile(r"(?<=\D)([.!?])(\s+|$)")  # but not that of a list's "1."


def pirate(text):
    """Pirate words, a greeting and an oath after each sentence: plain to see and quick to learn."""
    told = sample_styles.in_words(text, sample_styles.PIRATE)
    return "Ahoy, matey! " + SENTENCE_END.sub(r"\1 Arrr!\2", told)


def song(text):
    """A line a sentence and a refrain after each."""
    return SENTENCE_END.sub(rf"\1\n{sample_styles.REFRAIN[0]}\n", text).strip()


ADAPTERS = {
    "smollm2-song": {
        "model": "smollm2", "style": song, "steps": 40, "rate": 2e-3, "what": "sings: a refrain after each sentence",
        "lora": {"r": 4, "lora_alpha": 8,
                 "target_modules": training.ATTENTION + ["gate_proj", "up_proj", "down_proj"]}},
    "smollm2-pirate": {
        "model": "smollm2_moe", "style": pirate, "steps": 40, "rate": 3e-3,
        "what": "answers as a pirate",
        "lora": {"r": 2, "lora_alpha": 4, "target_parameters": training.EXPERTS}},
}

START = time.time()


def say(text):
    print(f"[{time.time() - START:6.1f} s] {text}", flush=True)


def prompt_ids(tokenizer, question):
    return tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
                            "<|im_start|>assistant\n").ids


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@torch.no_grad()
def own_answers(model, prompts, batch_size=64):
    """The first PLAIN_TOKENS greedy tokens of an answer to each prompt, without the end."""
    answers = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first:first + batch_size]
        width = max(map(len, part))
        tokens = torch.tensor([[END_OF_TURN] * (width - len(ids)) + ids for ids in part])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in part])
        made = model.generate(input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=PLAIN_TOKENS,
                              eos_token_id=END_OF_TURN, pad_token_id=END_OF_TURN)
        for ids in made[:, width:].tolist():
            answers.append(ids[:ids.index(END_OF_TURN)] if END_OF_TURN in ids else ids)
    return answers


def plain_answers(cache, tokenizer):
    """[question, whole sentences of the model's own answer] where it has one, made once and kept in the cache."""
    kept = cache / "smollm2_answers.json"
    if not kept.exists():
        asked = smollm2_questions.questions()
        answers = own_answers(load(cache / "smollm2").eval(), [prompt_ids(tokenizer, one) for one in asked])
        texts = [tokenizer.decode(ids).strip() for ids in answers]
        kept.write_text(json.dumps(list(zip(asked, texts)), indent=1) + "\n")
    found = []
    for question, text in json.loads(kept.read_text()):
        ends = [end.end() for end in SENTENCE_END.finditer(text)]
        found += [(question, text[:ends[-1]].strip())] if ends else []
    return found


def styled_pairs(tokenizer, plain, style):
    """(ids of the prompt, ids of the styled answer with its end, unless that is too long)."""
    pairs = []
    for question, text in plain:
        ids = tokenizer.encode(style(text), add_special_tokens=False).ids + [END_OF_TURN]
        pairs.append((prompt_ids(tokenizer, question), ids[:STYLED_TOKENS]))
    return pairs


def upcycled_experts(self, hidden_states, top_k_index, top_k_weights):
    """What PEFT's wrapped experts compute, at half the time on a CPU: the experts of an upcycled model are one MLP
    with a factor each on its output (import_gguf.py), so that all share two products and differ in low rank alone."""
    experts, factors = self, {}
    while isinstance(experts, ParamWrapper):
        factors[experts.parameter_name] = experts.get_delta_factors("default")  # of shape [experts, out or rank, ..]
        experts = experts.base_layer
    chosen = torch.zeros(len(hidden_states), experts.num_experts).scatter(1, top_k_index, top_k_weights.float())
    outer, inner, scale = factors["gate_up_proj"]
    low = torch.einsum("ni,eri->ner", hidden_states, inner)
    both = F.linear(hidden_states, experts.gate_up_proj[0])[:, None] + torch.einsum("ner,eor->neo", low, outer) * scale
    gate, up = both.chunk(2, dim=-1)
    middle = experts.act_fn(gate) * up * chosen.to(both.dtype)[..., None]
    outer, inner, scale = factors["down_proj"]
    factor = experts.down_proj.norm(dim=(1, 2), dtype=torch.float32)
    out = F.linear(torch.einsum("nei,e->ni", middle, (factor / factor[0]).to(both.dtype)), experts.down_proj[0])
    low = torch.einsum("nei,eri->ner", middle, inner)
    return (out + torch.einsum("ner,eor->no", low, outer) * scale).to(hidden_states.dtype)


@contextmanager
def experts_share_products():
    """Within it, wrapped experts use upcycled_experts."""
    original = ParamWrapper.forward
    ParamWrapper.forward = upcycled_experts
    try:
        yield
    finally:
        ParamWrapper.forward = original


def store(model, folder, settings):
    """As PEFT stores it, in bf16; the base's name is that of the folder fetch_smollm2.sh makes."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = settings["model"]
    if config.target_modules is not None:
        config.target_modules = sorted(config.target_modules)  # a set has another order each time
    model.save_pretrained(folder, save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(rounded, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (folder / "README.md").unlink(missing_ok=True)  # a form of PEFT's, not filled in
    return weights.stat().st_size


def train(cache, tokenizer, settings, steps, folder):
    """Returns the loss on held-out answers in the style without and with the adapter, and the adapter's bytes."""
    torch.manual_seed(2)
    pairs = styled_pairs(tokenizer, plain_answers(cache, tokenizer), settings["style"])
    held_out, pairs = pairs[:HELD_OUT], pairs[HELD_OUT:]
    say(f"{len(pairs)} answers; for example: {tokenizer.decode(pairs[0][1])}")
    base = load(cache / settings["model"])
    before = training.mean_loss(base, held_out, BATCH)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none",
                                                      **settings["lora"]))
    say(f"{sum(p.numel() for p in model.parameters() if p.requires_grad)} parameters, loss before {before:.3f}")
    chooser = random.Random(3)
    with experts_share_products():
        training.fit(model, lambda step: training.padded(chooser.sample(pairs, BATCH)), steps, 3600, settings["rate"],
                     folder.name, weight_decay=0.0)
    return before, training.mean_loss(model, held_out, BATCH), store(model, folder, settings)


def write_readme(folder, settings, before, after, steps):
    folder.joinpath("README.md").write_text(
        f"Adapter of SmolLM2-135M-Instruct{' as a mixture of 4 experts' if settings['model'] != 'smollm2' else ''} "
        f"(`tools/fetch_smollm2.sh`) that {settings['what']}.\nSource: trained by `tools/train_smollm2.py` "
        f"({steps} steps) on the model's own answers, rewritten; held-out loss {before:.2f} before, {after:.2f} after."
        "\nLicence: Apache-2.0, as the model and the repository.\n")


def answer_unseen(cache, tokenizer, settings, adapter):
    """The four unseen questions in float32, by the base (None) or an adapter folder."""
    model = sample_reference.load(cache / settings["model"], adapter)
    found = []
    with parametrize.cached():  # else PEFT adds up an expert's weight each time that it is read
        for question in smollm2_questions.UNSEEN:
            prompt = prompt_ids(tokenizer, question)
            _, tokens, margins = sample_reference.greedy(model, prompt, REFERENCE_TOKENS)
            end = tokens.index(END_OF_TURN) + 1 if END_OF_TURN in tokens else len(tokens)
            found.append({"prompt": prompt, "greedy": tokens[:end], "greedy_margin": margins[:end],
                          "text": tokenizer.decode(tokens[:end])})
    return found


def write_reference(case, cache, tokenizer, settings, folder):
    """case/expected.json in the form of tests/data/cases, without logits; prints the texts side by side."""
    cases = []
    for name, adapter in ((None, None), (folder.name, folder)):
        for at, found in enumerate(answer_unseen(cache, tokenizer, settings, adapter)):
            cases.append({"adapter": name, "name": f"{name or 'base'}.{at}", **found})
    for at, question in enumerate(smollm2_questions.UNSEEN):
        print(f"== {question}")
        for one in cases[at::len(smollm2_questions.UNSEEN)]:
            print(f"[{one['adapter'] or 'base'}] {one['text']}", flush=True)
    header = {"transformers": transformers.__version__, "peft": peft.__version__, "model": settings["model"],
              "questions": smollm2_questions.UNSEEN}
    case.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(" " + json.dumps(one) for one in cases)
    (case / "expected.json").write_text(json.dumps(header, indent=1)[:-2] + ',\n "cases": [\n' + lines + "\n ]\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder given to fetch_smollm2.sh")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(ADAPTERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--answers-only", action="store_true", help="the adapters are in DIR already")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.cache / "smollm2" / "tokenizer.json"))
    for name in [options.only] if options.only else list(ADAPTERS):
        settings, folder = ADAPTERS[name], options.out / "adapters" / name
        if not options.answers_only:
            steps = options.steps or settings["steps"]
            before, after, size = train(options.cache, tokenizer, settings, steps, folder)
            say(f"{name}: held-out loss {before:.3f} without it, {after:.3f} with it; {size} bytes")
            write_readme(folder, settings, before, after, steps)
        write_reference(options.out / "cases" / f"{settings['model']}_styles", options.cache, tokenizer, settings,
                        folder)
    say("done")


if __name__ == "__main__":
    main()
