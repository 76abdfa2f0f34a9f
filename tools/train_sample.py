#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the sample model and its adapters from nothing: stories, tokenizer, model, adapters, reference results.

    train_sample.py --out DIR [--device cuda] [--minutes 3] [--adapter-seconds 20] [--smoke [--steps 20]]

Writes DIR/models/tiny-moe, DIR/adapters/NAME, DIR/case (a case folder of `moelora verify`), DIR/texts.txt and
DIR/report.json. Needs torch, transformers 5, peft, tokenizers; about 6 minutes on one GPU. --smoke makes everything
tiny and takes a minute on a CPU. The same seeds give the same stories; weights differ in rounding and with the speed of
the machine, as training ends by the clock.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import sample_styles
import sample_text

VALIDATION = 10_000_000  # seeds of held-out stories begin here
ADAPTER_SEEDS = 20_000_000
STYLED_SHARE = 0.18  # of the model's own stories are in one of the styles, from their first word
BASE_RATE, ADAPTER_RATE = 2e-3, 2e-3

START = time.time()


def say(text):
    print(f"[{time.time() - START:6.1f} s] {text}", flush=True)


def mixed_story(seed):
    """A plain story, or with some luck one in a style: so the model knows the words that adapters call for."""
    rng = random.Random(f"style {seed}")
    text = sample_text.story(seed)
    if rng.random() < STYLED_SHARE:
        text = sample_styles.STYLES[rng.choice(list(sample_styles.STYLES))](text)
    return text


def split_story(style, seed):
    """A plain beginning of 2 to 14 words and the rest, in a style or plain (None)."""
    text = sample_text.story(seed)
    spaces = [at for at, char in enumerate(text) if char == " "]
    at = random.Random(f"split {seed}").choice(spaces[1:14])
    return sample_styles.continued(style, text, at) if style else (text[:at], text[at:])


def split_stories(style, first, count):
    return [split_story(style, seed) for seed in range(first, first + count)]


def in_parallel(function, arguments):
    """[function(*argument) for each], by as many processes as there are cores."""
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return pool.starmap(function, arguments)


def mixed_stories(first, count):
    return [mixed_story(seed) for seed in range(first, first + count)]


def make_texts(options):
    """Everything that needs many processes, before torch starts threads and a device: they do not survive a fork."""
    chunk = 100 if options.smoke else 1000
    parts = in_parallel(mixed_stories, [(first, chunk) for first in range(0, options.stories, chunk)])
    texts = [text for part in parts for text in part]
    known = set(texts)
    held_out = sample_text.stories(VALIDATION, 100 if options.smoke else 1000)
    fresh = [text for text in held_out if text not in known]
    say(f"{len(texts)} stories ({len(known)} different), {len(fresh)} held out "
        f"({len(held_out) - len(fresh)} left out as known); for example: {texts[0]}")
    count = 300 if options.smoke else 12000
    jobs = [(style, ADAPTER_SEEDS, count) for style in sample_styles.STYLES]
    styled = dict(zip(sample_styles.STYLES, in_parallel(split_stories, jobs)))
    say(f"{count} stories for each of {', '.join(styled)}")
    return texts, fresh, styled


def random_batches(rows, size, seed):
    """step -> tokens and labels of `size` rows, another order in each pass."""
    import torch
    per_pass = max(1, len(rows) // size)
    order = {}

    def batch(step):
        number, at = divmod(step, per_pass)
        if number not in order:
            order.clear()
            order[number] = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + number))
        tokens = rows[order[number][at * size:(at + 1) * size]]
        return tokens, tokens
    return batch


def train_base(options, tokenizer, texts, folder):
    import torch
    import sample_training as training
    from transformers import Qwen3MoeForCausalLM
    torch.manual_seed(1)
    rows = training.packed_rows(training.encode(tokenizer, texts))
    say(f"{rows.numel()} tokens in {len(rows)} rows, {tokenizer.get_vocab_size()} in the vocabulary")
    model = Qwen3MoeForCausalLM(training.model_config(tokenizer.get_vocab_size(), options.smoke)).to(options.device)
    say(f"model of {sum(p.numel() for p in model.parameters())} parameters")
    batch = random_batches(rows.to(options.device), min(256, len(rows)) if not options.smoke else 4, 1)
    training.fit(model, batch, options.steps, options.minutes * 60, BASE_RATE, "model", router_loss=0.01)
    model.to(torch.bfloat16).save_pretrained(folder)
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device)


def train_adapter(options, tokenizer, name, pairs, model_dir, folder):
    """One adapter on the rounded base; returns the loss on held-out stories in its style without and with it."""
    import peft
    import torch
    import sample_training as training
    from transformers import Qwen3MoeForCausalLM
    torch.manual_seed(2)
    base = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(options.device)
    heads = training.encode(tokenizer, [head for head, _ in pairs])
    tails = training.encode(tokenizer, [tail for _, tail in pairs])
    pairs = list(zip(heads, tails))
    held_out = pairs[:len(pairs) // 40]
    pairs = pairs[len(held_out):]
    before = training.mean_loss(base, held_out)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none",
                                                      **training.ADAPTERS[name]))
    size = 4 if options.smoke else 64
    chooser = random.Random(3)
    training.fit(model, lambda step: training.padded(chooser.sample(pairs, size)), min(options.steps, 600),
                 options.adapter_seconds, ADAPTER_RATE, name, weight_decay=0.0)
    config = model.peft_config["default"]
    config.base_model_name_or_path = "tiny-moe"
    if config.target_modules is not None:
        config.target_modules = sorted(config.target_modules)  # a set has another order each time
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form of PEFT's, not filled in
    return before, training.mean_loss(model, held_out)


def write_readme(folder, report):
    text = f"""# tiny-moe

A Qwen3-MoE of {report['parameters'] / 1e6:.1f} million parameters (6 layers, 8 experts of which 2 work on a token,
bf16) that writes short simple stories. It exists to show and test the runtime; it knows nothing else.

* Source: trained from random weights by `tools/train_sample.py` on {report['stories']} stories that
  `tools/sample_text.py` made; no other text. {report['styled_share']:.0%} of them are in one of the styles of
  `tools/sample_styles.py`, so that the words exist which the adapters in `samples/adapters` call for.
* Licence: Apache-2.0, as the rest of the repository.
* Validation loss: {report['validation_loss']:.3f} nats a token on {report['held_out']} plain stories of other seeds,
  with the weights as they are stored (the first words of a story cannot be guessed).
* Tokenizer: byte-level BPE with Qwen's pre-tokenizer, {report['vocabulary']} tokens; trained on rows of 320 tokens.
"""
    (folder / "README.md").write_text(text)


def run(options):
    texts, fresh, styled = make_texts(options)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import sample_reference
    import sample_training as training
    say(f"torch {torch.__version__} on {options.device}")
    tokenizer = training.train_tokenizer(texts[:40000])
    model_dir = options.out / "models" / "tiny-moe"
    training.save_tokenizer(tokenizer, model_dir)
    say("tokenizer written")
    report = {"stories": len(texts), "styled_share": STYLED_SHARE, "held_out": len(fresh),
              "vocabulary": tokenizer.get_vocab_size(), "adapters": {}}
    with training.experts_as_products():
        model = train_base(options, tokenizer, texts, model_dir)
        report["parameters"] = sum(p.numel() for p in model.parameters())
        pairs = [(ids[:1], ids[1:]) for ids in training.encode(tokenizer, fresh)]
        report["validation_loss"] = training.mean_loss(model, pairs)
        del model
        say(f"validation loss {report['validation_loss']:.4f}")
        write_readme(model_dir, report)
        for name, pairs in styled.items():
            before, after = train_adapter(options, tokenizer, name, pairs, model_dir, options.out / "adapters" / name)
            report["adapters"][name] = {"loss_of_base": before, "loss": after}
            say(f"adapter {name}: held-out loss {before:.3f} without it, {after:.3f} with it")
    for path in options.out.rglob("*.safetensors"):
        path.chmod(0o644)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    torch.set_float32_matmul_precision("highest")
    sample_reference.write_references(options.out, list(styled), tokenizer, 2 if options.smoke else 10)
    say(f"references written; all in {options.out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training the model")
    parser.add_argument("--adapter-seconds", type=float, default=20.0)
    parser.add_argument("--stories", type=int)
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--smoke", action="store_true", help="everything tiny: does it run through?")
    options = parser.parse_args()
    options.steps = options.steps or (20 if options.smoke else 20000)
    options.stories = options.stories or (600 if options.smoke else 300000)
    run(options)


if __name__ == "__main__":
    main()
